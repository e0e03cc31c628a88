"""Cache operations under way: their ids, and what waits for their acknowledgment.

Ids are counted from 0 over all kinds. What an operation reads or writes on the device
stays held until it is acknowledged, whatever becomes of the request it was for.
"""

from collections.abc import Callable

from drumline.contract.cache import CacheAck
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.index import IndexArray


class Transfers:
    """Operations that are planned and not acknowledged."""

    __slots__ = ("_ended", "_next", "_pins", "_pool")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._next = 0
        self._ended: dict[int, Callable[[bool], None]] = {}
        self._pins: dict[int, IndexArray] = {}

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def pinning(self) -> bool:
        """Whether an operation holds blocks of the device, which its end may free."""
        return bool(self._pins)

    def begin(self, ended: Callable[[bool], None], pins: IndexArray) -> int:
        """Return a new operation's id. `ended` learns whether it moved what it should.

        The device blocks `pins`, distinct and held already, are held until then.
        """
        op_id = self._next
        self._next += 1
        self._ended[op_id] = ended
        if len(pins):
            self._pool.hold(pins)
            self._pins[op_id] = pins
        return op_id

    def acknowledge(self, ack: CacheAck) -> None:
        """End an operation. Unknown ids, and those acknowledged before, are ignored."""
        ended = self._ended.pop(ack.op_id, None)
        if ended is None:
            return
        pins = self._pins.pop(ack.op_id, None)
        if pins is not None:
            self._pool.release(pins)
        ended(ack.ok)

    def held(self) -> list[IndexArray]:
        """Return the device blocks that operations hold, an operation an entry."""
        return list(self._pins.values())
