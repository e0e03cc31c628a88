"""When the frontend is told this engine's load.

Outputs always carry it. Without outputs a changed load is told at once, and an
unchanged one once a second, so that a router can tell an idle engine from a dead
link. It counts nothing itself.
"""

from drumline.contract.outputs import Load

HEARTBEAT_US = 1_000_000


class LoadReport:
    """What was last told, and when."""

    def __init__(self) -> None:
        self._last: Load | None = None
        self._at_us = 0

    def due(self, load: Load, outputs: bool, now_us: int) -> bool:
        """Whether to send this round, and note that it is sent."""
        if not outputs and load == self._last and now_us - self._at_us < HEARTBEAT_US:
            return False
        self._last = load
        self._at_us = now_us
        return True
