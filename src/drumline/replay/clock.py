"""Time that moves when it is told to."""


class ManualClock:
    """A clock for simulations; idle waits move it, and whoever drives them."""

    def __init__(self, now_us: int = 1_000_000) -> None:
        self._now_us = now_us

    def now_us(self) -> int:
        """Return the time that was last set."""
        return self._now_us

    def advance(self, us: int) -> None:
        """Let `us` microseconds pass."""
        self._now_us += us
