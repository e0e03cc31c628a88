"""What a device has not computed yet, and a thread that waits for it in place of others.

The forward thread goes on with the next task, and the control thread reaches no device. It knows
neither what is waited for nor who asks.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from drumline.device.staging import Array, Download

T_co = TypeVar("T_co", covariant=True)

_log = logging.getLogger(__name__)


class Landing(Generic[T_co]):
    """A value that is made of tensors once they are on the host."""

    __slots__ = ("_download", "_made")

    def __init__(self, download: Download, made: Callable[[list[Array]], T_co]) -> None:
        self._download = download
        self._made = made

    @property
    def here(self) -> bool:
        """Whether `land` waits for nothing."""
        return self._download.here

    def land(self) -> T_co:
        """Wait for the tensors, and return the value. Thread: any, once."""
        return self._made(self._download.wait())


class LandingThread:
    """Runs what waits for a device, first in, first out."""

    __slots__ = ("_queue", "_thread")

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, run: Callable[[], None]) -> None:
        """Run this behind all that was put before; it must not raise."""
        self._queue.put(run)

    def stop(self, timeout_s: float) -> None:
        """Run what was put, then end the thread, which is waited for so long. Idempotent."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self.alive:
            _log.warning("%s did not end within %g s", self._thread.name, timeout_s)

    def _serve(self) -> None:
        while (run := self._queue.get()) is not None:
            run()
