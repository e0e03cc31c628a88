"""Clients that leave, stall, dawdle and send nonsense: nothing of them stays behind.

Some hundred requests here; `make soak` sends ten thousand (`DRUMLINE_SOAK_REQUESTS`).
"""

import asyncio
import functools
import os
import random

from tests.fakes.http import CHAT, TIMEOUT_S, served, until
from tests.fakes.restless import ACTS, Client

from drumline.core.config import ServerConfig
from drumline.frontend.service import Timings

REQUESTS = int(os.environ.get("DRUMLINE_SOAK_REQUESTS", "250"))
AT_ONCE = 24
PER_SECOND = 10
"""The least that is expected of a busy machine."""
WORDS = "word " * 60
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a"},
    "/generate": {"text": "a"},
}


def test_nothing_stays_behind_whatever_clients_do(embedded):
    asyncio.run(_soak(embedded))


async def _soak(embedded) -> None:
    dice = random.Random(7)
    numbers = iter(range(REQUESTS))
    acts: dict[str, int] = {}
    server = ServerConfig(host="127.0.0.1", port=0, unread_timeout=0.5)
    timings = Timings(ping_s=0.05, first_output_s=0.05)
    async with (
        asyncio.timeout(TIMEOUT_S + REQUESTS / PER_SECOND),
        served(embedded, says=WORDS, step_s=0.0005, server=server, timings=timings) as it,
    ):
        await it.chat()
        before = len(asyncio.all_tasks())

        async def clients() -> None:
            for number in numbers:
                own = random.Random(dice.random())
                act = await Client(it.url, it.http, BODIES, own, number).act()
                acts[act] = acts.get(act, 0) + 1

        await asyncio.gather(*(clients() for _ in range(AT_ONCE)))
        assert sum(acts.values()) == REQUESTS
        assert len(acts) == ACTS
        await it.service.live.idle.wait()
        assert it.service.engine.in_flight == 0
        await until(functools.partial(_idle, it.fake))
        await until(lambda: len(asyncio.all_tasks()) <= before)
        reply = (await it.chat()).json()
        assert reply["choices"][0]["finish_reason"] == "stop"


def _idle(fake) -> bool:
    """Whether the engine holds no request of anybody's."""
    return not fake._running
