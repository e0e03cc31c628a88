"""Clients that leave, stall, dawdle, are late and send nonsense, over sockets of their own."""

import asyncio
import json
import random
import socket


class Client:
    """One connection, which does one thing that clients do."""

    def __init__(self, url, http, bodies, dice: random.Random, number: int, **tuned) -> None:
        """Ask the server at `url` for `bodies`, by route; `http` is for what an operator does.

        `tuned`: `late` is how long a body may take that never comes, `heavy` what a route is
        asked for whose answer is more than a connection buffers.
        """
        self.url = url
        self.http = http
        self.bodies = bodies
        self.dice = dice
        self.rid = f"r{number}"
        self.late = tuned.get("late", False)
        self.heavy = tuned.get("heavy")

    async def act(self) -> str:
        """Do it; return what it was."""
        acts = (self.reads, self.reads, self.leaves, self.dawdles, self.stalls, self.babbles,
                self.begins_a_body, self.is_aborted)  # fmt: skip
        act = self.dice.choice((*acts, *acts, self.is_late) if self.late else acts)
        host, port = self.url.removeprefix("http://").split(":")
        end = socket.socket()
        if act == self.stalls:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        end.setblocking(False)
        await asyncio.get_running_loop().sock_connect(end, (host, int(port)))
        self.reader, self.writer = await asyncio.open_connection(sock=end, limit=2**16)
        try:
            await act()
        except ConnectionError:
            pass  # what a server may do to a client that does not read
        finally:
            self.writer.close()
        return act.__name__

    async def ask(self, **more) -> None:
        path = self.dice.choice(sorted(self.bodies))
        stream = self.dice.random() < 0.7
        asked = self.bodies[path] | {"stream": stream, "rid": self.rid} | more
        await self.send(path, json.dumps(asked).encode())

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
        if self.heavy is None:
            await self.ask(stream=True)
        else:
            path, body = self.heavy
            await self.send(path, json.dumps(body | {"stream": True, "rid": self.rid}).encode())
        await self.reader.read(10)
        await asyncio.sleep(self.dice.random() * (0.5 if self.heavy is None else 2.0))

    async def babbles(self) -> None:
        await self.send("/v1/completions", self.dice.randbytes(self.dice.randrange(200)))
        assert b" 400 " in await self.reader.read()

    async def begins_a_body(self) -> None:
        await self.send("/v1/chat/completions", b'{"messages": [', 1000)
        await asyncio.sleep(self.dice.random() * 0.02)

    async def is_late(self) -> None:
        await self.send("/v1/completions", b'{"prompt": ', 1000)
        assert b" 408 " in await self.reader.read()

    async def is_aborted(self) -> None:
        await self.ask()
        await asyncio.sleep(self.dice.random() * 0.03)
        await self.http.post("/abort_request", json={"rid": self.rid})
        await self.reader.read()


ACTS = 7
"""How many kinds there are, besides the late."""
