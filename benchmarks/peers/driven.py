"""An engine inside a program of ours that runs under the engine's own Python.

The program (`drivers/`) is told of works in lines of JSON and answers in such; it has no more
than its own standard library and the engine, so it cannot share code with this package.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.peers.child import Child
from benchmarks.peers.engine import Answer, PeerFailed
from benchmarks.peers.work import Work

DRIVERS = Path(__file__).parent / "drivers"
_START_S = 600.0
_WORK_S = 600.0


class _Done(Struct):
    answers: list[Answer] = []
    error: str = ""


_decode = msgspec.json.Decoder(_Done).decode


class Driven:
    """An `Engine` whose process runs a driver."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._command = command
        self._env = env
        self._log = log
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        """The driver's process. Raises PeerFailed where it does not run."""
        return self._running.pid

    def start(self) -> None:
        self._child = Child(self._command, self._env, self._log, spoken_with=True)
        self._told(_START_S)

    def measure(self, work: Work) -> list[Answer]:
        self._running.say(msgspec.json.encode(work))
        answers = self._told(_WORK_S + max(work.arrivals)).answers
        short = [
            f"{answer.tokens} tokens, not {asked}"
            for answer, asked in zip(answers, work.tokens, strict=True)
            if answer.tokens != asked
        ]
        if short:
            raise PeerFailed(f"an answer of {work.name} has {short[0]}")
        return answers

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    @property
    def _running(self) -> Child:
        if self._child is None:
            raise PeerFailed("is not started")
        return self._child

    def _told(self, timeout_s: float) -> _Done:
        line = self._running.line(timeout_s)
        try:
            done = _decode(line)
        except msgspec.MsgspecError:
            raise PeerFailed(f"said {line[:200]!r}, which is no answer") from None
        if done.error:
            raise PeerFailed(done.error)
        return done
