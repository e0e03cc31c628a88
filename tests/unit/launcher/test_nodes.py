"""Machines that share an engine: how ranks are spread, where they meet, what they show."""

import importlib.util
import logging

import pytest

from drumline.core.config import Config, DistributedBackend, FrontendConfig, ParallelConfig
from drumline.core.errors import ConfigError
from drumline.launcher.engine import Engine
from drumline.launcher.nodes import check_nodes, frontend_host, shared_token
from drumline.launcher.ray_cluster import placed_on_ray

MEETING = {"nnodes": 2, "dist_init_addr": "127.0.0.1:29000"}


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        ({"nprocs_per_node": 2}, "--nprocs-per-node: 2 on each of 1 machines"),
        (
            {"tensor_parallel_size": 4, "nprocs_per_node": 3, **MEETING},
            "--nprocs-per-node: 3 on each of 2 machines (--nnodes) are not the 4 ranks",
        ),
        (
            {"tensor_parallel_size": 3, **MEETING},
            "--nnodes: 3 ranks cannot be shared evenly by 2 machines",
        ),
        ({**MEETING}, "--nnodes: 1 ranks cannot be shared evenly by 2 machines"),
        ({"node_rank": 1}, "--node-rank: 1 is no number of 1 machines: 0 to 0"),
        (
            {"data_parallel_size": 2, "nnodes": 2},
            "--dist-init-addr: is not set; the ranks of 2 machines",
        ),
        (
            {"data_parallel_size": 2, **MEETING, "dist_init_addr": "nowhere"},
            "--dist-init-addr: 'nowhere' is not host:port",
        ),
        (
            {"data_parallel_size": 2, **MEETING, "dist_init_addr": "0.0.0.0:1"},
            "--dist-init-addr: 0.0.0.0 is every address",
        ),
    ],
)
def test_ranks_that_cannot_be_spread_are_refused_by_the_flag(parallel, told):
    with pytest.raises(ConfigError) as caught:
        check_nodes(Config(parallel=ParallelConfig(**parallel)))
    assert str(caught.value).startswith(told)


def test_headless_ranks_of_several_machines_need_a_frontend_that_all_reach():
    parallel = ParallelConfig(data_parallel_size=2, **MEETING)
    with pytest.raises(ConfigError, match=r"--data-parallel-address: 127\.0\.0\.1 is another"):
        check_nodes(Config(parallel=parallel, frontend=FrontendConfig(headless=True)))
    there = FrontendConfig(headless=True, data_parallel_address="10.0.0.1")
    check_nodes(Config(parallel=parallel, frontend=there))


@pytest.mark.parametrize(
    ("parallel", "host"),
    [
        ({}, "127.0.0.1"),
        ({"data_parallel_size": 2, "dist_init_addr": "127.0.0.2:1"}, "127.0.0.1"),
        # One replica over two machines: the rank that dials is on the first.
        (
            {"tensor_parallel_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.2:1"},
            "127.0.0.1",
        ),
        ({"data_parallel_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.2:1"}, "127.0.0.2"),
        ({"data_parallel_size": 2, "nnodes": 2, "dist_init_addr": "[::1]:1"}, "::1"),
    ],
)
def test_a_frontend_awaits_ranks_beyond_loopback_only_where_some_come_from_there(parallel, host):
    assert frontend_host(ParallelConfig(**parallel)) == host


def test_a_machine_alone_draws_its_secret():
    assert shared_token(ParallelConfig()) != shared_token(ParallelConfig())


def test_machines_with_one_secret_show_the_same_and_others_do_not(tmp_path):
    (tmp_path / "a").write_text("open sesame\n")
    (tmp_path / "b").write_text("open barley")

    def shown(name, node):
        file = None if name is None else str(tmp_path / name)
        return shared_token(
            ParallelConfig(data_parallel_size=2, node_rank=node, dist_secret_file=file, **MEETING)
        )

    assert shown("a", 0) == shown("a", 1) != shown("b", 1)
    assert shown(None, 0) == shown(None, 1) != shown("a", 1)
    with pytest.raises(ConfigError, match=r"--dist-secret-file: .* cannot be read"):
        shown("c", 0)
    (tmp_path / "c").write_text("\n")
    with pytest.raises(ConfigError, match=r"--dist-secret-file: .* is empty"):
        shown("c", 0)


def test_the_first_machine_warns_where_nothing_is_shown(caplog):
    parallel = ParallelConfig(data_parallel_size=2, **MEETING)
    with caplog.at_level(logging.WARNING):
        shared_token(parallel)
    assert "127.0.0.1:29000" in caplog.text
    assert "--dist-secret-file" in caplog.text


def test_a_program_owns_an_engine_on_the_first_machine_only():
    parallel = ParallelConfig(data_parallel_size=2, node_rank=1, **MEETING)
    with pytest.raises(ConfigError, match="--node-rank: other machines than the first"):
        Engine(Config(parallel=parallel), quiet=True)
    parallel = ParallelConfig(distributed_backend=DistributedBackend.RAY)
    with pytest.raises(ConfigError, match="--distributed-backend: only `drumline serve`"):
        Engine(Config(parallel=parallel), quiet=True)


def test_ray_that_is_not_installed_is_named_with_what_brings_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(ConfigError, match="Ray is not installed: pip install drumline"),
        placed_on_ray(Config()),
    ):
        pass
