"""Processes of engines: started, listened to with a bound, and ended by their ids."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.peers.engine import PeerFailed

_STOP_S = 20.0
_TAIL_LINES = 4


class Child:
    """A process and those below it. What it says, but for what `line` reads, goes to a file."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, *, spoken_with: bool
    ) -> None:
        """Start it; with `spoken_with`, `say` and `line` are its standard streams.

        Raises PeerFailed where there is no such program.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._rest = b""
        with log.open("wb") as errors:
            try:
                self._process = subprocess.Popen(
                    list(command),
                    env={**os.environ, **env},
                    stdin=subprocess.PIPE if spoken_with else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if spoken_with else errors,
                    stderr=errors,
                )
            except OSError as error:
                raise PeerFailed(f"{command[0]} cannot be run: {error.strerror}") from None
        self.pid = self._process.pid

    def say(self, line: bytes) -> None:
        """Write a line to its standard input. Raises PeerFailed once it is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise PeerFailed(f"ended: {self.tail()}") from None

    def line(self, timeout_s: float) -> bytes:
        """Return its next line. Raises PeerFailed when it ends, or says nothing for so long."""
        assert self._process.stdout is not None
        deadline = time.perf_counter() + timeout_s
        file = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(file, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                left = deadline - time.perf_counter()
                if left <= 0 or not selector.select(left):
                    raise PeerFailed(f"said nothing for {timeout_s:.0f} s: {self.tail()}")
                read = os.read(file, 1 << 20)
                if not read:
                    raise PeerFailed(f"ended: {self.tail()}")
                self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def check(self) -> None:
        """Raise PeerFailed if it has ended."""
        if self._process.poll() is not None:
            raise PeerFailed(f"ended with status {self._process.returncode}: {self.tail()}")

    def tail(self) -> str:
        """Return the last lines of its log, as one."""
        text = self._log.read_text(errors="replace") if self._log.is_file() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
        return " / ".join(lines) or "it said nothing"

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it and whatever it left below it; wait until they are gone."""
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.pid).children(recursive=True)
        if self._process.poll() is None:
            self._process.send_signal(number)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for each in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(below, timeout=_STOP_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not read any more
                    stream.close()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process and those below it so far, in seconds."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for each in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system
    return total
