"""What may not happen once a rank serves, and what tells it.

The control thread reaches no device, so no operation of torch may run on it. The forward thread
waits for no device on the way of a round, or the next forward could not be queued behind the one
that runs; and it compiles nothing, which takes as long as many rounds. Start-up does all of
that on purpose, so the forward thread's checks are armed at one mark behind it.

On a CPU there is nothing to wait for: an operation is over when it returns. What is checked there
is that no compiler is run or loaded.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.core.config import DeviceChecks
from drumline.core.errors import InvariantError

_log = logging.getLogger(__name__)

_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
"""Packages that are loaded to compile something."""


class NoDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """While a thread is in this context, any operation of torch on it raises InvariantError."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor has this

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise InvariantError(
            f"{func} ran on the thread {threading.current_thread().name!r}, which reaches no device"
        )


@contextmanager
def waiting_for(device: torch.device) -> Iterator[None]:
    """Let the forward thread wait for its device within this context, whatever is checked."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class ForwardChecks:
    """What is checked of a forward thread that serves."""

    __slots__ = ("_checks", "_device", "_thread")

    def __init__(self, checks: DeviceChecks, device: torch.device) -> None:
        self._checks = checks
        self._device = device
        self._thread: int | None = None

    def arm(self) -> None:
        """Start-up is over. Thread: forward thread; the process has one such mark."""
        self._thread = threading.get_ident()
        # It cannot be taken out again, and costs nothing where nothing is loaded or started.
        sys.addaudithook(self._saw)
        self._watch_waits(on=True)

    def disarm(self) -> None:
        """Check nothing any more. Idempotent."""
        if self._thread is not None:
            self._thread = None
            self._watch_waits(on=False)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let a task wait for the device that an operator waits for, off the way of rounds."""
        armed = self._thread is not None
        if armed:
            self._watch_waits(on=False)
        try:
            yield
        finally:
            if armed:
                self._watch_waits(on=True)

    def _watch_waits(self, *, on: bool) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_sync_debug_mode(self._checks.value if on else "default")

    def _saw(self, event: str, arguments: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        if event == "import" and _is_compiler(arguments[0]):
            self._tell(f"loaded {arguments[0]}")
        elif event == "subprocess.Popen":
            self._tell(f"started {arguments[0]}")

    def _tell(self, what: str) -> None:
        text = f"the forward thread {what} while it serves: whatever is compiled must be by then"
        if self._checks is DeviceChecks.ERROR:
            raise InvariantError(text)
        _log.warning("%s", text, stack_info=True)


def _is_compiler(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in _COMPILERS)
