"""Clients that leave, stall, dawdle and send nonsense: nothing of them stays behind.

Some hundred requests here; `make soak` sends ten thousand (`DRUMLINE_SOAK_REQUESTS`).
"""

import asyncio
import functools
import json
import os
import random

from tests.fakes.http import CHAT, TIMEOUT_S, served, until

from drumline.core.config import ServerConfig
from drumline.frontend.service import Timings

REQUESTS = int(os.environ.get("DRUMLINE_SOAK_REQUESTS", "250"))
AT_ONCE = 24
PER_SECOND = 10
"""The least that is expected of a busy machine."""
WORDS = "word " * 60


class Client:
    """One connection, which does one thing that clients do."""

    def __init__(self, it, dice: random.Random, number: int) -> None:
        self.it = it
        self.dice = dice
        self.rid = f"r{number}"

    async def act(self) -> str:
        """Do it; return what it was."""
        act = self.dice.choice(
            (self.reads, self.reads, self.leaves, self.dawdles, self.stalls, self.babbles,
             self.begins_a_body, self.is_aborted)
        )  # fmt: skip
        host, port = self.it.url.removeprefix("http://").split(":")
        self.reader, self.writer = await asyncio.open_connection(host, int(port), limit=2**16)
        try:
            await act()
        except ConnectionError:
            pass  # what a server may do to a client that does not read
        finally:
            self.writer.close()
        return act.__name__

    async def ask(self, **more) -> None:
        path = self.dice.choice(("/v1/chat/completions", "/v1/completions", "/generate"))
        body = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "a"}}.get(
            path, {"text": "a"}
        )
        stream = self.dice.random() < 0.7
        await self.send(
            path, json.dumps(body | {"stream": stream, "rid": self.rid} | more).encode()
        )

    async def send(self, path: str, body: bytes, length: int | None = None) -> None:
        length = len(body) if length is None else length
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}"
        self.writer.write(head.encode() + b"\r\n\r\n" + body)
        await self.writer.drain()

    async def reads(self) -> None:
        await self.ask()
        reply = await self.reader.read()
        assert b" 200 OK" in reply, reply
        assert b'"stop"' in reply or b'"length"' in reply, reply

    async def leaves(self) -> None:
        await self.ask()
        await asyncio.sleep(self.dice.random() * 0.05)

    async def dawdles(self) -> None:
        await self.ask()
        part = b"some"
        while part:
            part = await self.reader.read(self.dice.randrange(1, 2048))
            await asyncio.sleep(0.001)

    async def stalls(self) -> None:
        await self.ask(stream=True)
        await self.reader.read(10)
        await asyncio.sleep(self.dice.random() * 0.5)

    async def babbles(self) -> None:
        await self.send("/v1/completions", self.dice.randbytes(self.dice.randrange(200)))
        assert b" 400 " in await self.reader.read()

    async def begins_a_body(self) -> None:
        await self.send("/v1/chat/completions", b'{"messages": [', 1000)
        await asyncio.sleep(self.dice.random() * 0.02)

    async def is_aborted(self) -> None:
        await self.ask()
        await asyncio.sleep(self.dice.random() * 0.03)
        await self.it.http.post("/abort_request", json={"rid": self.rid})
        await self.reader.read()


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
                act = await Client(it, random.Random(dice.random()), number).act()
                acts[act] = acts.get(act, 0) + 1

        await asyncio.gather(*(clients() for _ in range(AT_ONCE)))
        assert sum(acts.values()) == REQUESTS
        assert len(acts) == 7
        await it.service.live.idle.wait()
        assert it.service.engine.in_flight == 0
        await until(functools.partial(_idle, it.fake))
        await until(lambda: len(asyncio.all_tasks()) <= before)
        reply = (await it.chat()).json()
        assert reply["choices"][0]["finish_reason"] == "stop"


def _idle(fake) -> bool:
    """Whether the engine holds no request of anybody's."""
    return not fake._running
