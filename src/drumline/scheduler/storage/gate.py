"""Whether the storage tier is too far behind to be asked for more."""

from drumline.contract.storage import StoragePressure


class PressureGate:
    """Closes when any pressure is at its high mark, opens again when all are at their low."""

    __slots__ = ("_high", "_low", "closed")

    def __init__(self, high: StoragePressure, low: StoragePressure) -> None:
        self._high = high
        self._low = low
        self.closed = False

    def update(self, pressure: StoragePressure) -> None:
        """Learn the pressure of this round."""
        high, low = self._high, self._low
        if self.closed:
            self.closed = (
                pressure.queued_operations > low.queued_operations
                or pressure.queued_bytes > low.queued_bytes
                or pressure.oldest_operation_us > low.oldest_operation_us
            )
        else:
            self.closed = (
                pressure.queued_operations >= high.queued_operations
                or pressure.queued_bytes >= high.queued_bytes
                or pressure.oldest_operation_us >= high.oldest_operation_us
            )
