"""An engine behind HTTP, asked with streams by the client of `drumline bench`.

Of events it takes the numbers, and no more: what it costs, it takes from both sides' cores.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec
from msgspec import Struct

from benchmarks.peers.child import Child
from benchmarks.peers.engine import Answer, PeerFailed
from benchmarks.peers.work import Work
from drumline.bench.client import Target, connected
from drumline.core.errors import PeerError

_START_S = 600.0
_WORK_S = 600.0
_POLL_S = 0.1
_HEALTH_S = 5.0


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
        # One client for all: each reads the system's certificates, which takes a third of a core
        # from the server that is starting.
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=_HEALTH_S) as client:
            while not _healthy(client, self._health):
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
    stamps: list[float] = []
    counts: list[int] = []
    decode_s: float | None = None

    def heard(event: bytes) -> None:
        nonlocal decode_s
        before = counts[-1] if counts else 0
        grown = dialect.read(event, before)
        if grown.tokens:
            stamps.append(time.perf_counter())
            counts.append(before + grown.tokens)
        if grown.decode_s is not None:
            decode_s = grown.decode_s

    body = msgspec.json.encode(dialect.body(prompt, tokens))
    try:
        async with connected(Target("127.0.0.1", port)) as connection:
            began = time.perf_counter()
            await connection.post(dialect.path, body, heard)
    except PeerError as error:
        raise PeerFailed(str(error)) from error
    answer = Answer(began, stamps, counts, decode_s)
    if answer.tokens != tokens:
        raise PeerFailed(f"an answer has {answer.tokens} of {tokens} tokens")
    return answer


def _healthy(client: httpx.Client, path: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return client.get(path).status_code == 200
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
