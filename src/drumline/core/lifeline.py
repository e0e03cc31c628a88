"""A child process's tie to the process that started it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_FAILED = 1


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies, where it can.

    Ends the process when the parent is dead already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(_FAILED)
