"""What the operator's signals ask for: the first to finish and stop, the second to stop at once."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

STOPPING = (signal.SIGTERM, signal.SIGINT)

_AT_ONCE_S = 0.5
"""What ranks get to end by themselves when their start is broken off."""
_FAILED_S = 5.0
"""What they get when the engine failed, to say what each of them saw."""
_SIGNALLED = 128


class Signals:
    """The stop signals that came, as two futures.

    A callback only notes its signal; whoever awaits the future does the work.

    Thread: the main thread's event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first: asyncio.Future[int] = loop.create_future()
        """The number of the first signal."""
        self.second: asyncio.Future[int] = loop.create_future()
        """The number of the second signal."""
        for number in STOPPING:
            loop.add_signal_handler(number, self._caught, number)

    def _caught(self, number: int) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(number)
                return

    def status(self, *, served: bool) -> int:
        """Return the exit status of whoever these signals ended."""
        if self.second.done():
            return _SIGNALLED + self.second.result()
        # Whoever broke the start off must not take it for a server that ran and ended well.
        return 0 if served else _SIGNALLED + self.first.result()


async def stop_ranks(
    stop: Callable[[float | None], Coroutine[Any, Any, None]],
    kill: Callable[[], None],
    signals: Signals,
    *,
    served: bool,
) -> None:
    """Stop an engine: at once where a second signal came or a first broke the start off."""
    if signals.second.done():
        grace_s: float | None = 0.0
    elif signals.first.done():
        grace_s = None if served else _AT_ONCE_S
    else:
        grace_s = _FAILED_S
    stopping = asyncio.create_task(stop(grace_s))
    await first_of(stopping, signals.second)
    if not stopping.done():
        kill()
    await stopping


async def first_of(*waits: asyncio.Future[Any]) -> None:
    """Wait until the first of `waits` is done."""
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


async def unless_signalled(
    work: Coroutine[Any, Any, T], signals: Signals
) -> asyncio.Task[T] | None:
    """Return the task in which `work` ended; None where a signal came first, which cancels it."""
    task = asyncio.create_task(work)
    await first_of(task, signals.first)
    if task.done():
        return task
    task.cancel()
    await asyncio.wait((task,))
    return None
