"""Ranks without a server: a frontend of somebody else's binds, they dial, and end with it."""

import asyncio
import signal

from tests.e2e.engines import Engine
from tests.e2e.processes import Server, gone_within

from drumline.client.engine_client import EngineClient

READY = "drumline serve ready: "
WHERE = "127.0.0.1:30517"
FLAGS = (
    *("--headless", "--data-parallel-rpc-port", WHERE.rpartition(":")[2], "--dtype", "float32"),
    *("--data-parallel-size", "2", "--max-total-tokens", "4096", "--log-level", "warning"),
)
PROMPT = [5, 6, 7, 8]


async def answered(client):
    """Return what each rank says to the same prompt."""
    engine = Engine(None, client, [])
    await client.ready(60)
    return [(await engine.tokens(f"r{rank}", PROMPT, 6, rank=rank))[0] for rank in (0, 1)]


def test_headless_ranks_register_with_a_frontend_end_with_it_and_register_anew(tiny_model):
    async def run():
        # The ranks are first; their greeting waits for the frontend.
        server = Server(*FLAGS, "--model", str(tiny_model), ready=READY)
        try:
            client = EngineClient(2)
            await client.bind(f"tcp://{WHERE}")
            first = await answered(client)
            assert first[0] == first[1]
            await asyncio.to_thread(server.wait_ready)
            assert server.url == f"2 ranks for the frontend at tcp://{WHERE}"
            ranks = server.ranks()
            await client.close()
            assert await asyncio.to_thread(server.wait, 20) == 1
            assert "the frontend is gone" in server.lines[-1]
            assert gone_within(ranks, 2)
        finally:
            server.close()
        # Now the frontend is first.
        client = EngineClient(2)
        await client.bind(f"tcp://{WHERE}")
        again = Server(*FLAGS, "--model", str(tiny_model), ready=READY)
        try:
            assert await answered(client) == first
            again.signal(signal.SIGTERM)
            assert await asyncio.to_thread(again.wait, 20) == 0, again.said
            assert client.closed.is_set(), "its last word was heard"
        finally:
            again.close()
            await client.close()

    asyncio.run(run())
