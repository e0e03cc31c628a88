"""drumline's own programs, started as their users would, and what they cost.

No program is waited for without a bound.
"""

import contextlib
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from msgspec import Struct

GENERATE_S = 120.0
START_S = 180.0
STOP_S = 60.0
_READY = "drumline serve ready on "
_DRUMLINE = (sys.executable, "-m", "drumline")


class ProgramFailed(Exception):  # noqa: N818 - a fact about a program, told by its name
    """A program ended as it should not, or took too long; the message says which and why."""


class Started(Struct, frozen=True):
    """What `drumline generate` took."""

    first_s: float
    """From its start to the first byte of its answer."""
    processor_s: float
    """What its processes computed until their end."""


def generated(log: Path) -> Started:
    """Have one token generated; what the program says besides goes to `log`.

    Raises ProgramFailed.
    """
    command = [*_DRUMLINE, "generate", "Hi", "--max-tokens", "1", "--temperature", "0"]
    log.parent.mkdir(parents=True, exist_ok=True)
    spent = _children_s()
    with log.open("wb") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
        with _bounded(process, GENERATE_S):
            assert process.stdout is not None
            first = process.stdout.read(1)
            took = time.perf_counter() - began
            process.communicate()
    if process.returncode == -signal.SIGKILL:
        raise ProgramFailed(f"drumline generate did not end in {GENERATE_S:.0f} s")
    if process.returncode or not first.strip():
        raise ProgramFailed(f"drumline generate ended with {process.returncode}: {_tail(log)}")
    return Started(took, _children_s() - spent)


class Server(Struct, frozen=True):
    """A `drumline serve` that is ready."""

    url: str
    root: psutil.Process

    @property
    def tree(self) -> list[psutil.Process]:
        """All its processes."""
        return [self.root, *self.root.children(recursive=True)]


@contextlib.contextmanager
def served(flags: Sequence[str] = ()) -> Iterator[Server]:
    """Serve on a free port with `flags` until the block ends. Raises ProgramFailed."""
    command = [*_DRUMLINE, "serve", "--port", "0", "--log-level", "warning", *flags]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        limit = threading.Timer(START_S, process.kill)
        limit.start()
        try:
            ready = next((line for line in process.stdout if line.startswith(_READY)), None)
        finally:
            limit.cancel()
        if ready is None:
            raise ProgramFailed(f"drumline serve was not ready within {START_S:.0f} s, or ended")
        yield Server(ready.removeprefix(_READY).strip(), psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def memory_mib(processes: Sequence[psutil.Process]) -> dict[str, dict[str, float]]:
    """Return each process's part of what is resident (PSS), whole and by kind, under its title.

    A page that several share counts in part for each. Linux only.
    """
    return {each.cmdline()[0]: _pss_mib(each.pid) for each in processes}


def _pss_mib(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    return {
        kind: round(kib[kind] / 1024, 1) for kind in ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")
    }


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-400:].strip()


def _children_s() -> float:
    """Return the processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def _bounded(process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """Kill a process that has not ended in time, and whenever the block ends."""
    limit = threading.Timer(seconds, process.kill)
    limit.start()
    try:
        yield
    finally:
        limit.cancel()
        process.kill()
        process.wait()
