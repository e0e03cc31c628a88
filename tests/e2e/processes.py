"""A real `drumline serve`, as its operator would run it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

READY = "drumline serve ready on "
START_S = 120
STOP_S = 60


class Server:
    """One process tree; what it says on either stream is kept, in order."""

    def __init__(
        self, *flags: str, ready: str = READY, prefix: tuple[str, ...] = (), **env: str
    ) -> None:
        """Start it; `ready` is what its line begins with that ends in where it is reached."""
        port = ("--port", "0") if ready == READY and "--port" not in flags else ()
        self._said_when_ready = ready
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "drumline", "serve", *port, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment() | env,
        )
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(self._said_when_ready):
                self.url = line.removeprefix(self._said_when_ready).strip()
                self._ready.set()
        self._ready.set()

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self) -> "Server":
        """Wait until it serves."""
        self._ready.wait(START_S)
        assert self.url, f"the server did not start:\n{self.said}"
        return self

    def ranks(self) -> list[psutil.Process]:
        """Return the rank processes."""
        return psutil.Process(self.process.pid).children()

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Wait for its end; return the exit status."""
        status = self.process.wait(timeout_s)
        self._reader.join(5)
        return status

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self.process.poll() is None:
            self.signal()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def environment() -> dict[str, str]:
    """Return this environment without what would change a run, and what makes it strict."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DRUMLINE_")}
    return kept | {"HF_HUB_OFFLINE": "1", "DRUMLINE_DEVICE_CHECKS": "error"}


def run(*arguments: str, stdin: str = "", timeout_s: float = START_S) -> "Run":
    """Run the command `drumline` to its end."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "drumline", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(),
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr, time.perf_counter() - began)


class Run:
    """A command that ended."""

    def __init__(self, status: int, out: str, err: str, seconds: float) -> None:
        self.status = status
        self.out = out
        self.err = err
        self.seconds = seconds

    def __repr__(self) -> str:
        return f"status {self.status} in {self.seconds:.1f} s, {self.out!r}, {self.err!r}"


def gone_within(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether all of `processes` are dead (or dead and not reaped) within `seconds`."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        if not any(map(_runs, processes)):
            return True
        time.sleep(0.02)
    return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(fact, seconds: float = 10.0) -> None:
    """Wait until `fact()` holds; fail when it does not within `seconds`."""
    deadline = time.perf_counter() + seconds
    while not fact():
        assert time.perf_counter() < deadline, "that did not become so in time"
        time.sleep(0.05)


REPOSITORY = Path(__file__).parents[2]
