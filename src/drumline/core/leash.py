"""A command that ends with the process that wants it, and with it all that it started.

Run as a script, `python leash.py COMMAND …` in a process group of its own: it runs the command
and ends as that does. Its standard input is a pipe whose other end is the wanting process's
alone; once that is closed, by whatever end of the process, the whole group is killed.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress

_DIES_S = 5.0


class TooLongError(Exception):
    """The command did not end in time, and was killed."""


def run_leashed(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Run a command to its end; return its exit status and what it said on standard error.

    Raises TooLongError. Nothing of it outlives this process, or the time.
    """
    here, there = os.pipe()
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *command],
                stdin=here,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
        except BaseException:
            os.close(there)
            raise
        finally:
            os.close(here)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TooLongError from None
        finally:
            os.close(there)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_DIES_S)
        said.seek(0)
        return status, said.read().decode(errors="replace")


def _main(command: Sequence[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_watch, daemon=True).start()
    return child.wait()


def _watch() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
