"""A Slurm step says where its tasks stand; flags may say the same, and nothing else."""

import pytest

from drumline.core.config import ParallelConfig
from drumline.core.errors import ConfigError
from drumline.core.slurm import first_host, placed

STEP = {
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[07-08]",
}


def test_a_step_of_several_machines_places_the_ranks():
    found = placed(ParallelConfig(tensor_parallel_size=4), STEP)
    assert (found.nodes, found.node) == (2, 1)
    assert found.dist_init_addr == "node07:23456"
    assert found.tensor_parallel_size == 4


def test_without_the_steps_own_count_the_jobs_counts():
    step = {name: value for name, value in STEP.items() if "STEP_NUM" not in name}
    assert placed(ParallelConfig(), step).nodes == 4


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_NNODES": "4", "SLURM_NODEID": "0"},  # a job's shell, which is no step
        STEP | {"SLURM_STEP_NUM_NODES": "1"},
    ],
)
def test_outside_a_step_of_several_machines_nothing_changes(environment):
    parallel = ParallelConfig(nnodes=3, node_rank=2)
    assert placed(parallel, environment) is parallel


def test_a_meeting_place_that_was_named_stays():
    parallel = ParallelConfig(dist_init_addr="ib0:1", nnodes=2, node_rank=1)
    assert placed(parallel, STEP).dist_init_addr == "ib0:1"


@pytest.mark.parametrize(
    ("parallel", "environment", "told"),
    [
        (ParallelConfig(nnodes=3), STEP, "--nnodes: 3, but the Slurm step says 2"),
        (ParallelConfig(node_rank=0), STEP, "--node-rank: 0, but the Slurm step says 1"),
        (
            ParallelConfig(),
            STEP | {"SLURM_STEP_NUM_TASKS": "8"},
            "SLURM_STEP_NUM_TASKS: 8 tasks on 2 machines",
        ),
        (ParallelConfig(), STEP | {"SLURM_NODEID": "x"}, "SLURM_NODEID: 'x' is no number"),
        (ParallelConfig(), STEP | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST: ''"),
    ],
)
def test_a_contradiction_is_refused_by_name(parallel, environment, told):
    with pytest.raises(ConfigError) as caught:
        placed(parallel, environment)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("login1", "login1"),
        ("a,b,c", "a"),
        ("node[07-12,20],login1", "node07"),
        ("node[3,5]", "node3"),
        ("rack[1-2]n[04-05].cluster", "rack1n04.cluster"),
        ("a-b[001]", "a-b001"),
    ],
)
def test_the_first_host_of_a_list_is_found(node_list, host):
    assert first_host(node_list) == host


@pytest.mark.parametrize("node_list", ["", ",a", "node[", "node]", "node[]"])
def test_what_is_no_list_of_hosts_is_refused(node_list):
    with pytest.raises(ConfigError, match="is no list of hosts"):
        first_host(node_list)
