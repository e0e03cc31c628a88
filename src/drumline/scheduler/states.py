"""The state groups: what recurrent layers carry from token to token, two blocks a row.

A forward of a row reads what was carried up to its first token from one block and writes
what it carries on into another. The next chunk of a prompt reads what the one before it
wrote and writes elsewhere, so that what lies behind a boundary stays as it is and can be
cached. Decodes follow one another too closely for that: the first one moves the row to a
block of its own, its live one, which later decodes read and write in place. Without
prefix caching nobody else wants the prompt's last block, and it is the live one itself.

It numbers state groups as the pool does, behind those whose blocks hold tokens, and knows
nothing of requests.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from drumline.contract.specs import CacheGroup
from drumline.core.errors import InvariantError
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.draft import Draft
from drumline.scheduler.index import IndexArray
from drumline.scheduler.rows import Rows


class _Slots(Struct):
    """One group's blocks by row: read from, and written to."""

    group: int
    read: list[int]
    written: list[int]


class StateSlots:
    """Which blocks a row's forwards read and write, in every state group."""

    __slots__ = ("_caching", "_live", "_pool", "_rows", "_slots")

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        first_group: int,
        pool: BlockPool,
        rows: Rows,
        *,
        caching: bool,
    ) -> None:
        size = len(rows.owners)
        self._pool = pool
        self._rows = rows
        self._caching = caching
        self._slots = [
            _Slots(first_group + at, [0] * size, [0] * size) for at in range(len(groups))
        ]
        self._live = [False] * size
        """Whether a row's written block is its own to change, as decodes do."""

    def __len__(self) -> int:
        return len(self._slots)

    # -- prompts ------------------------------------------------------------------

    def needs(self, found: Sequence[int]) -> list[int]:
        """Return the blocks of each group that `open` takes."""
        return [1 if block else 2 for block in found] or [2] * len(self._slots)

    @property
    def next_needs(self) -> list[int]:
        """Blocks of each group that a row's next forward takes, a live row's aside."""
        return [1] * len(self._slots)

    def open(self, row: int, found: Sequence[int], draft: Draft) -> None:
        """Start `row` on cached blocks, one a group and held, or from nothing. The pool has room.

        A group's block is 0 where one is to be loaded to. The first forward writes to new blocks.
        """
        for slots, need, block in zip(
            self._slots, self.needs(found), found or [0] * len(self._slots), strict=True
        ):
            blocks = self._pool.take(slots.group, need)
            slots.read[row], slots.written[row] = block or int(blocks[0]), int(blocks[-1])
            self._show(slots, row, draft)
            blank = blocks[-1:] if found else blocks
            draft.zero(slots.group, self._pool.pages(slots.group, blank))

    def read(self, row: int) -> list[int]:
        """Return each group's block that the next forward of `row` reads, null where live."""
        return [slots.read[row] for slots in self._slots]

    def advance(self, row: int, draft: Draft) -> None:
        """Have the next forward of `row` read what the last one wrote. The pool has room.

        It writes to new blocks.
        """
        epoch = int(self._rows.epoch[row])
        for slots in self._slots:
            if slots.read[row]:
                self._pool.release(np.array([slots.read[row]]), epoch)
            block = self._pool.take(slots.group, 1)
            slots.read[row], slots.written[row] = slots.written[row], int(block[0])
            self._show(slots, row, draft)
            draft.zero(slots.group, self._pool.pages(slots.group, block))

    # -- decodes ------------------------------------------------------------------

    def restless(self, rows: IndexArray) -> bool:
        """Whether one of `rows` holds a block that its next decode does not write."""
        return bool(self.reading(rows).any()) or not all(self._live[row] for row in rows.tolist())

    def decode_needs(self, row: int) -> list[int]:
        """Return the blocks of each group that the next decode of `row` takes."""
        return [0 if self._live[row] or not self._caching else 1] * len(self._slots)

    def decode(self, row: int, draft: Draft) -> None:
        """Prepare the next decode of `row`; the pool has the room for `decode_needs`."""
        if not self._live[row]:
            self._live[row] = True
            if self._caching:
                self.advance(row, draft)
                return
        self._let_go_of_read(row, draft)

    def reading(self, rows: IndexArray) -> NDArray[np.bool_]:
        """Return which of `rows` still hold a block that their next decode does not read."""
        read = self._slots[0].read
        return np.array([read[row] > 0 for row in rows.tolist()], np.bool_)

    def holds_read(self, row: int) -> bool:
        """Whether `row` still holds a block that its next decode does not read."""
        return self._slots[0].read[row] > 0

    def _let_go_of_read(self, row: int, draft: Draft) -> None:
        epoch = int(self._rows.epoch[row])
        for slots in self._slots:
            if slots.read[row]:
                self._pool.release(np.array([slots.read[row]]), epoch)
                slots.read[row] = 0
                self._show(slots, row, draft)

    # -- what is carried ----------------------------------------------------------

    def carried(self, row: int) -> list[int]:
        """Return each group's block of what is carried behind the row's computed tokens."""
        return [slots.written[row] for slots in self._slots]

    def adopt(self, row: int, blocks: Sequence[int], draft: Draft) -> None:
        """Have `row` carry cached blocks of the same content in place of its own, 0 for none."""
        for slots, block in zip(self._slots, blocks, strict=True):
            own = slots.written[row]
            if block and block != own:
                self._pool.hold(np.array([block]))
                self._pool.release(np.array([own]))
                slots.written[row] = block
                self._show(slots, row, draft)

    def end(self, row: int) -> None:
        """Say that no forward of `row` will be planned any more: others may see its blocks."""
        self._live[row] = False

    def restore(self, row: int, draft: Draft) -> list[int]:
        """Give `row` live blocks that an image is copied to; the pool has one a group."""
        for slots in self._slots:
            slots.written[row] = int(self._pool.take(slots.group, 1)[0])
            self._show(slots, row, draft)
        self._live[row] = bool(self._slots)
        return self.carried(row)

    def blocks(self, row: int) -> IndexArray:
        """Return all blocks that `row` holds."""
        held = [slots.read[row] for slots in self._slots] + self.carried(row)
        return np.array([block for block in held if block], np.intp)

    def close(self, row: int) -> None:
        """Release everything `row` holds."""
        epoch = int(self._rows.epoch[row])
        for slots in self._slots:
            for line in (slots.read, slots.written):
                if line[row]:
                    self._pool.release(np.array([line[row]]), epoch)
                    line[row] = 0
        self._live[row] = False

    def _show(self, slots: _Slots, row: int, draft: Draft) -> None:
        blocks = np.array([slots.read[row], slots.written[row]])
        draft.patch(
            slots.group,
            np.full(2, row, np.int32),
            np.arange(2, dtype=np.int32),
            self._pool.pages(slots.group, blocks),
        )

    # -- proof --------------------------------------------------------------------

    def held(self) -> list[IndexArray]:
        """Return the blocks that rows hold, a line an entry."""
        lines = [np.array(line) for slots in self._slots for line in (slots.read, slots.written)]
        return [line[line > 0] for line in lines]

    def check(self) -> None:
        """Raise InvariantError unless rows have what they should, and live blocks one row."""
        for slots in self._slots:
            rows_of = Counter(slots.read + slots.written)
            for row, owner in enumerate(self._rows.owners):
                read, written = slots.read[row], slots.written[row]
                if bool(written) != (owner is not None) or (read and not written):
                    raise InvariantError(f"row {row} has state blocks {read} and {written}")
                for block in filter(None, (read, written)):
                    if self._pool.group_of[block] != slots.group:
                        raise InvariantError(f"row {row} has another group's block for its state")
                if self._live[row] and (self._pool.node[written] or rows_of[written] != 1):
                    raise InvariantError(f"row {row} changes a state that others see")
