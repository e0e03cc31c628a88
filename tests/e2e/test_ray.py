"""A Ray cluster places the ranks of other machines: two workers on this one play them.

Needs the package `ray`, which the project installs for whoever asks (`drumline[ray]`); without
it these tests are skipped.
"""

import importlib.util
import subprocess
import sys

import httpx
import psutil
import pytest
from tests.e2e.processes import REPOSITORY, Server, environment, gone_within, run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster of two workers, the first of which is this machine's own."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment() | {"RAY_DISABLE_METRICS_COLLECTION": "1"},
        cwd=REPOSITORY,
    )
    try:
        address = process.stdout.readline().strip()
        assert address, "the cluster did not start"
        yield address
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def flags(model, *others):
    return (
        *("--model", str(model), "--dtype", "float32", "--max-total-tokens", "4096"),
        *("--distributed-backend", "ray", "--log-level", "warning", *others),
    )


def answer(url):
    body = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
    }
    reply = httpx.post(f"{url}/generate", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["output_ids"]


def placed_ranks():
    """Return the rank processes of the engine that runs here, whoever started them."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [""])[0] in {"drumline::rank0_tp0", "drumline::rank1_tp1"}
    ]


def test_where_there_is_no_cluster_it_is_said_so(tiny_model):
    refused = run("serve", *flags(tiny_model, "--tensor-parallel-size", "2", "--nnodes", "2"))
    assert refused.status == 2
    assert "--distributed-backend: no Ray cluster is found here" in refused.err


@pytest.fixture(scope="module")
def expected(tiny_model):
    """What one rank answers."""
    alone = Server("--model", str(tiny_model), "--dtype", "float32", "--max-total-tokens", "4096")
    try:
        return answer(alone.wait_ready().url)
    finally:
        alone.close()


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_ranks_that_ray_placed_answer_as_one_does_and_end_together(
    tiny_model, cluster, expected, end
):
    server = Server(
        *flags(tiny_model, "--tensor-parallel-size", "2", "--nnodes", "2"), RAY_ADDRESS=cluster
    )
    try:
        assert answer(server.wait_ready().url) == expected
        ranks = placed_ranks()
        assert len(ranks) == 2
        if end == "stopped":
            server.signal()
        else:
            next(rank for rank in ranks if "rank1" in rank.cmdline()[0]).kill()
        assert server.wait() == (1 if end == "killed" else 0), server.said
        if end == "killed":
            assert "rank 1" in server.said
        assert gone_within(ranks, 10)
    finally:
        server.close()


def test_a_cluster_that_is_too_small_is_refused(tiny_model, cluster):
    words = flags(tiny_model, "--tensor-parallel-size", "3", "--nnodes", "3")
    server = Server(*words, RAY_ADDRESS=cluster)
    try:
        assert server.wait() == 2
        assert "--nnodes: 2 nodes besides this one are wanted; 1 of" in server.lines[-1]
    finally:
        server.close()
