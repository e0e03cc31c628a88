"""Starting one rank's process, now or ahead of knowing what it will serve.

A rank's modules take longer to load than all the rest of a start; one that is started ahead loads
them while its launcher does its own, and then reads its settings as any other. What is
imported here must be little, for the same reason.

Thread: a rank dies with the thread that starts it.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from drumline.contract.startup import AHEAD

RANK_COMMAND = (sys.executable, "-m", "drumline.rank")


class RankProcess:
    """A rank's process and the pipe on which it reports."""

    __slots__ = ("process", "read_fd", "report_fd")

    def __init__(self, command: Sequence[str], inherited: Sequence[int] = ()) -> None:
        """Start it; it inherits these descriptors besides. Raises OSError where it cannot be."""
        self.read_fd, write_fd = os.pipe()
        self.report_fd = write_fd
        """The number that the rank has its end of the pipe under."""
        os.set_blocking(self.read_fd, False)
        try:
            # A session of its own: the terminal's Ctrl-C reaches the launcher alone,
            # which then lets the requests finish.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=[write_fd, *inherited],
                start_new_session=True,
                env=_environment(os.environ),
            )
        except OSError:
            os.close(self.read_fd)
            raise
        finally:
            os.close(write_fd)


class Ahead:
    """A rank that is started ahead. As a context it ends, unless somebody took it."""

    def __init__(self) -> None:
        """Start it, if the system lets us; else there is none to take."""
        self._started: RankProcess | None = None
        with contextlib.suppress(OSError):
            self._started = RankProcess((*RANK_COMMAND, AHEAD, str(os.getpid())))

    def take(self) -> RankProcess | None:
        """Return the process, which is the caller's from now on; None when it is taken."""
        started, self._started = self._started, None
        return started

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        started = self.take()
        if started is not None:
            started.process.kill()
            started.process.wait()
            os.close(started.read_fd)
            assert started.process.stdin is not None
            started.process.stdin.close()


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank: ours, with threads that wait asleep and huge pages.

    OpenMP's workers otherwise spin at every barrier; beside anything else that wants a
    processor, be it our own server, a forward then takes several times as long. Tensors ask for
    huge pages only where torch finds this before it allocates the first one.
    """
    # What records profiles says so itself, on the error stream; only what it fails at matters.
    chosen = {"KINETO_LOG_LEVEL": "6", "THP_MEM_ALLOC_ENABLE": "1"} | dict(ours)
    if "OMP_WAIT_POLICY" in ours or "GOMP_SPINCOUNT" in ours:
        return chosen
    return {**chosen, "OMP_WAIT_POLICY": "PASSIVE"}
