"""The machine's clock, read in this one place.

Whoever needs the time takes a clock through its constructor, so that tests and
the simulator can hand in their own.
"""

import time


class SystemClock:
    """The monotonic clock of this machine."""

    def now_us(self) -> int:
        """Return microseconds since an arbitrary start; never goes backwards."""
        return time.monotonic_ns() // 1000

    def wall_s(self) -> float:
        """Return seconds since the epoch, for stamps that people read."""
        return time.time()
