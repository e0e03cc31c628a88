"""An engine behind HTTP, asked with streams over plain sockets.

The client reads lines and takes numbers out of events, and no more: what it costs, it takes
from both sides' cores.
"""

import asyncio
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.peers.child import Child
from benchmarks.peers.engine import Answer, PeerFailed
from benchmarks.peers.work import Work

_START_S = 600.0
_WORK_S = 600.0
_POLL_S = 0.1
_STATUS = re.compile(rb"HTTP/1\.\d (\d+)")


class Grown(Struct, frozen=True):
    """What one event of a stream says."""

    tokens: int
    """How many came in it, or 0 for an event about something else."""
    decode_s: float | None = None


class Dialect(Struct, frozen=True):
    """How a server is asked, and what its events say."""

    path: str
    body: Callable[[list[int], int], dict[str, object]]
    """A prompt and the length of the answer to what is posted."""
    read: Callable[[bytes, int], Grown]
    """An event's JSON and the tokens before it to what it says."""


class Served:
    """An `Engine` that is a server in a process of its own."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        health: str,
        dialect: Dialect,
        env: Mapping[str, str],
        log: Path,
    ) -> None:
        """Prepare a server; `command` is given the port to listen on."""
        self._command = command
        self._health = health
        self._dialect = dialect
        self._env = env
        self._log = log
        self._child: Child | None = None
        self.port = 0

    @property
    def pid(self) -> int:
        """The server's process. Raises PeerFailed where it does not run."""
        if self._child is None:
            raise PeerFailed("is not started")
        return self._child.pid

    def start(self) -> None:
        self.port = _free_port()
        command = self._command(self.port)
        self._child = Child(command, self._env, self._log, spoken_with=False)
        deadline = time.perf_counter() + _START_S
        while asyncio.run(_status(self.port, self._health)) != 200:
            self._child.check()
            if time.perf_counter() > deadline:
                raise PeerFailed(f"did not serve within {_START_S:.0f} s: {self._child.tail()}")
            time.sleep(_POLL_S)

    def measure(self, work: Work) -> list[Answer]:
        if self._child is None:
            raise PeerFailed("is not started")
        try:
            return asyncio.run(asked(self.port, self._dialect, work))
        except PeerFailed:
            self._child.check()
            raise

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None


async def asked(port: int, dialect: Dialect, work: Work) -> list[Answer]:
    """Send the requests of a work when they are due; return the answers in order.

    Raises PeerFailed for an answer that is refused, breaks off or has another length.
    """
    began = time.perf_counter()
    limit = _WORK_S + max(work.arrivals)

    async def one(prompt: list[int], tokens: int, arrival: float) -> Answer:
        await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
        return await _answer(port, dialect, prompt, tokens)

    try:
        async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(*each))
                for each in zip(work.prompts, work.tokens, work.arrivals, strict=True)
            ]
    except TimeoutError:
        raise PeerFailed(f"{work.name} took more than {limit:.0f} s") from None
    except ExceptionGroup as group_of:
        error = group_of.exceptions[0]
        if isinstance(error, PeerFailed):
            raise error from None
        raise PeerFailed(f"{work.name}: {error!r}") from error
    return [task.result() for task in tasks]


async def _answer(port: int, dialect: Dialect, prompt: list[int], tokens: int) -> Answer:
    began = time.perf_counter()
    stamps: list[float] = []
    counts: list[int] = []
    decode_s: float | None = None
    count = 0
    body = msgspec.json.encode(dialect.body(prompt, tokens))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        writer.write(_head("POST", dialect.path, len(body)) + body)
        status = _STATUS.match(await reader.readline())
        if status is None or status[1] != b"200":
            said = (await reader.read()).partition(b"\r\n\r\n")[2]
            raise PeerFailed(f"answered {status and status[1].decode()}: {said[:300]!r}")
        # Lines of headers and of chunks' sizes are passed over like the blank ones.
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            grown = dialect.read(line[6:], count)
            if grown.tokens:
                count += grown.tokens
                stamps.append(time.perf_counter())
                counts.append(count)
            if grown.decode_s is not None:
                decode_s = grown.decode_s
    finally:
        writer.close()
    if count != tokens:
        raise PeerFailed(f"an answer has {count} of {tokens} tokens")
    return Answer(began, stamps, counts, decode_s)


async def _status(port: int, path: str) -> int | None:
    """Return the status of a plain request; None where nobody answers."""
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(_head("GET", path, 0))
                found = _STATUS.match(await reader.readline())
                return int(found[1]) if found else None
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None


def _head(method: str, path: str, length: int) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Usage(Struct):
    completion_tokens: int = 0


class _Event(Struct):
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Event).decode


def _openai_event(event: bytes, before: int) -> Grown:
    said = _decode(event)
    if said.error:
        raise PeerFailed(f"broke off: {said.error}")
    return Grown(0 if said.usage is None else said.usage.completion_tokens - before)


def openai_dialect(model: str) -> Dialect:
    """Return the dialect of OpenAI's completions with a count of tokens in every event."""

    def body(prompt: list[int], tokens: int) -> dict[str, object]:
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }

    return Dialect("/v1/completions", body, _openai_event)
