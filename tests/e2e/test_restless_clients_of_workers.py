"""Restless clients of a server with two HTTP workers: no page, no request and no socket stays.

Some hundred requests here; `make soak` sends ten thousand (`DRUMLINE_SOAK_REQUESTS`).
"""

import asyncio
import os
import random
import re

import httpx
import psutil
from tests.e2e.processes import Server, eventually
from tests.fakes.restless import ACTS, Client

REQUESTS = int(os.environ.get("DRUMLINE_SOAK_REQUESTS", "150"))
AT_ONCE = 24
LIMITS = {"max_tokens": 40, "ignore_eos": True}
SAMPLING = {"max_new_tokens": 40, "ignore_eos": True}
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w1 w2"}]} | LIMITS,
    "/v1/completions": {"prompt": "w1 w2 w3"} | LIMITS,
    "/generate": {"text": "w4 w5", "sampling_params": SAMPLING},
}
HEAVY = ("/v1/completions", {"prompt": "w6", "n": 4, "logprobs": 20} | LIMITS | {"max_tokens": 300})
FLAGS = (
    *("--api-server-count", "2", "--max-total-tokens", "8192"),
    *("--chat-template", "{{ messages[0].content }}", "--unread-timeout", "1"),
    *("--request-timeout", "12"),
)


def test_nothing_stays_behind_in_two_workers_and_their_engine(tiny_model):
    server = Server("--model", str(tiny_model), *FLAGS)
    try:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=30) as http:
            tree = [psutil.Process(server.process.pid), *server.ranks()]
            assert len(tree) == 4, "launcher, two workers, one rank"
            assert http.post("/v1/completions", json=BODIES["/v1/completions"]).status_code == 200
            before = [one.num_fds() for one in tree]
            acts = asyncio.run(_soak(server.url))
            assert sum(acts.values()) == REQUESTS
            assert len(acts) == ACTS + ("is_late" in acts)
            eventually(lambda: _nothing_held(http), 30)
            # A connection of each that asks, and those that a reading of `/metrics` opens.
            eventually(lambda: all(a.num_fds() <= b + 8 for a, b in zip(tree, before, strict=True)))
            assert http.post("/v1/completions", json=BODIES["/v1/completions"]).status_code == 200
        server.signal()
        assert server.wait() == 0, server.said
        assert not [line for line in server.lines if "Traceback" in line], server.said
    finally:
        server.close()


async def _soak(url: str) -> dict[str, int]:
    dice = random.Random(11)
    numbers = iter(range(REQUESTS))
    acts: dict[str, int] = {}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def clients() -> None:
            for number in numbers:
                own = random.Random(dice.random())
                client = Client(url, http, BODIES, own, number, late=True, heavy=HEAVY)
                act = await client.act()
                acts[act] = acts.get(act, 0) + 1

        async with asyncio.timeout(120 + REQUESTS):
            await asyncio.gather(*(clients() for _ in range(AT_ONCE)))
    return acts


def _nothing_held(http) -> bool:
    """Whether no page, no place and no request of anybody's is held."""
    told = http.get("/debug/kv").json()
    held = [pool["active"] for rank in told["ranks"] for pool in rank["pools"].values()]
    text = http.get("/metrics").text
    (serving,) = re.findall(r"^drumline:http_requests_in_flight\S* (\S+)", text, re.MULTILINE)
    return told["conserved"] and not any(held) and not float(serving)
