"""Two machines share an engine: its answers are one rank's, and one's end is both's.

The machines are network namespaces, joined by a cable that delays what it carries.
DRUMLINE_SOAK_NODES plays every layout and end (`make soak`).
"""

import asyncio
import os
from pathlib import Path

import httpx
import pytest
from tests.e2e.cable import Cable, inside, needs_namespaces
from tests.e2e.engines import running
from tests.e2e.processes import READY, Server, gone_within
from tests.e2e.test_several_ranks import NEAR_TIE, mixed_requests

pytestmark = needs_namespaces

SOAK = "DRUMLINE_SOAK_NODES" in os.environ
FOLLOWS = "drumline serve ready: "
DELAY_S = 0.002
ASKED = mixed_requests()[:12]


class Nodes:
    """One engine on the two machines of a cable."""

    def __init__(self, cable, model, *flags):
        self.cable = cable
        common = (
            *("--model", str(model), "--dtype", "float32", "--max-total-tokens", "4096"),
            *("--max-num-seqs", "16", "--chunked-prefill-size", "64", "--log-level", "warning"),
            *("--nnodes", "2", "--dist-init-addr", f"{cable.addresses[0]}:29500", *flags),
        )
        self.servers = [
            Server(
                *common,
                *("--node-rank", str(node)),
                ready=(READY, FOLLOWS)[node],
                prefix=cable.prefix(node),
            )
            for node in (0, 1)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in self.servers:
            server.close()

    def answers(self):
        """Return the first machine's greedy answers."""
        first, second = (server.wait_ready() for server in self.servers)
        assert second.url == "1 rank of node 1 of 2"

        async def one(client, prompt, count):
            body = {
                "input_ids": prompt,
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": count,
                    "ignore_eos": True,
                },
            }
            reply = await client.post("/generate", json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()["output_ids"]

        async def ask():
            async with httpx.AsyncClient(base_url=first.url, timeout=120) as client:
                return await asyncio.gather(*(one(client, *asked) for asked in ASKED))

        return inside(self.cable.names[0], lambda: asyncio.run(ask()))

    def reached(self):
        """Return the addresses on which the first machine listens."""
        heads = [Path(f"/proc/thread-self/net/{kind}") for kind in ("tcp", "tcp6")]
        texts = inside(self.cable.names[0], lambda: [head.read_text() for head in heads])
        fields = [line.split() for text in texts for line in text.splitlines()[1:]]
        return {each[1].split(":")[0] for each in fields if each[3] == "0A"}


@pytest.fixture(scope="module")
def alone(tiny_model):
    """Return what one rank answers, with its margins."""

    async def ask():
        async with running(tiny_model) as engine:
            return await asyncio.gather(
                *(engine.tokens(f"r{n}", *asked, top=2) for n, asked in enumerate(ASKED))
            )

    return asyncio.run(ask())


LAYOUTS = [(f"--{kind}-parallel-size", "2") for kind in ("tensor", "data", "pipeline")]
CASES = [(layout, end) for layout in LAYOUTS for end in ("cut", "killed", "stopped")]


@pytest.mark.parametrize(
    ("layout", "end"), CASES if SOAK else [(LAYOUTS[0], "cut")], ids=lambda it: str(it[0])
)
def test_two_machines_answer_as_one_rank_does_and_end_together(tiny_model, alone, layout, end):
    with Cable(DELAY_S) as cable, Nodes(cable, tiny_model, *layout) as nodes:
        for mine, (ids, margins) in zip(nodes.answers(), alone, strict=True):
            tie = next((at for at, margin in enumerate(margins) if margin < NEAR_TIE), None)
            assert mine[:tie] == ids[:tie]
            assert len(mine) == len(ids)
        assert cable.carried > 100, "the ranks met over the cable"
        reached = nodes.reached()
        assert reached
        assert not any(set(place) == {"0"} for place in reached), "of every address"
        first, second = nodes.servers
        ranks = [rank for server in nodes.servers for rank in server.ranks()]
        match end:
            case "cut":
                cable.cut()
                assert (first.wait(30), second.wait(30)) == (1, 1)
                assert "rank 1" in first.said
                assert "rank 0" in second.said
            case "killed":
                second.process.kill()
                assert first.wait(30) == 1
                assert "rank 1" in first.said
            case "stopped":
                first.signal()
                assert (first.wait(30), second.wait(30)) == (0, 0)
        assert gone_within(ranks, 5)


@pytest.mark.skipif(not SOAK, reason="long: a start-up that waits for its time; make soak")
def test_a_machine_that_does_not_come_is_named_within_the_bound(tiny_model):
    with Cable() as cable:
        flags = (
            *("--model", str(tiny_model), "--nnodes", "2", "--node-rank", "0"),
            *("--dist-init-addr", f"{cable.addresses[0]}:29500", "--startup-timeout", "40"),
            *("--data-parallel-size", "2"),
        )
        server = Server(*flags, prefix=cable.prefix(0))
        try:
            assert server.wait(60) == 1
            assert "ranks 1 of 2 (node 1) are missing" in server.lines[-1]
        finally:
            server.close()


@pytest.mark.skipif(not SOAK, reason="long; make soak")
def test_a_machine_that_shows_another_secret_is_turned_away(tiny_model, tmp_path):
    for node in (0, 1):
        (tmp_path / str(node)).write_text(f"secret of {node}")
    with Cable() as cable:
        servers = [
            Server(
                *("--model", str(tiny_model), "--nnodes", "2", "--node-rank", str(node)),
                *("--dist-init-addr", f"{cable.addresses[0]}:29500", "--startup-timeout", "40"),
                *("--data-parallel-size", "2", "--dist-secret-file", str(tmp_path / str(node))),
                prefix=cable.prefix(node),
                ready=(READY, FOLLOWS)[node],
            )
            for node in (0, 1)
        ]
        try:
            assert [server.wait(70) for server in servers] == [1, 1]
            assert "turned" in servers[0].said
        finally:
            for server in servers:
                server.close()
