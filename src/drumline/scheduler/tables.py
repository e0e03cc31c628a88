"""The block tables: which block holds which part of which row, in every group.

Column i of a group's table covers tokens i*g … (i+1)*g-1 of the row, g being the
group's block size. Every change is added to the draft of the plan as a patch; the
data plane's own tables change by those alone.
"""

from collections.abc import Sequence

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.contract.specs import CacheGroup
from drumline.core.errors import InvariantError
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.draft import Draft
from drumline.scheduler.rows import Rows


class BlockTables:
    """Each group's table, `table[row, column]`, in pool-wide block numbers."""

    __slots__ = ("_epoch", "_pool", "_rows", "block_tokens", "table")

    def __init__(
        self, groups: Sequence[CacheGroup], max_tokens: int, pool: BlockPool, rows: Rows
    ) -> None:
        size = len(rows.owners)
        self._pool = pool
        self._rows = rows
        self._epoch = np.zeros(size, np.int64)
        self.block_tokens = [group.block_tokens for group in groups]
        self.table: list[IntArray] = [
            np.zeros((size, -(-max_tokens // tokens)), np.int32) for tokens in self.block_tokens
        ]

    @property
    def max_tokens(self) -> int:
        """Tokens a row has columns for."""
        return min(
            int(table.shape[1]) * tokens
            for table, tokens in zip(self.table, self.block_tokens, strict=True)
        )

    def needs(self, tokens: int, cached_tokens: int) -> list[int]:
        """Return the blocks of each group that `tokens` take beyond `cached_tokens`."""
        return [-(-tokens // size) - cached_tokens // size for size in self.block_tokens]

    def open(
        self, row: int, epoch: int, hits: Sequence[IntArray], tokens: int, draft: Draft
    ) -> None:
        """Start `row` with the held blocks `hits[g]`, and room for `tokens` in all.

        The pool must have the room.
        """
        self._epoch[row] = epoch
        for group, hit in enumerate(hits):
            count = len(hit)
            if count:
                self.table[group][row, :count] = hit
                self._rows.columns[group, row] = count
                self._pool.epoch[hit] = epoch
                draft.patch(
                    group,
                    np.full(count, row, np.int32),
                    np.arange(count, dtype=np.int32),
                    self._pool.pages(group, hit),
                )
        self._grow(row, tokens, draft)

    def grow(self, row: int, tokens: int, draft: Draft) -> bool:
        """Give `row` room for `tokens`; False, and nothing happened, when there is none."""
        columns = self._rows.columns[:, row].tolist()
        needs = [
            max(-(-tokens // size) - have, 0)
            for size, have in zip(self.block_tokens, columns, strict=True)
        ]
        if any(needs):
            if not self._pool.make_room(needs):
                return False
            self._grow(row, tokens, draft)
        return True

    def _grow(self, row: int, tokens: int, draft: Draft) -> None:
        room = []
        for group, size in enumerate(self.block_tokens):
            have = int(self._rows.columns[group, row])
            want = max(-(-tokens // size), have)
            room.append(want * size)
            if want > have:
                blocks = self._pool.take(group, want - have)
                self.table[group][row, have:want] = blocks
                self._rows.columns[group, row] = want
                self._pool.epoch[blocks] = self._epoch[row]
                self._grant(
                    group,
                    np.full(want - have, row, np.int32),
                    np.arange(have, want, dtype=np.int32),
                    blocks,
                    draft,
                )
        self._rows.room[row] = min(room)

    def extend(self, rows: IntArray, tokens: IntArray, draft: Draft) -> bool:
        """Give each of `rows` room for `tokens[i]`, all or, returning False, none."""
        columns = self._rows.columns
        missing = [
            np.maximum(-(-tokens // size) - columns[group, rows], 0)
            for group, size in enumerate(self.block_tokens)
        ]
        needs = [int(count.sum()) for count in missing]
        if not self._pool.make_room(needs):
            return False
        for group, count in enumerate(missing):
            if not needs[group]:
                continue
            have = columns[group, rows]
            if needs[group] == len(rows) and (count == 1).all():
                at, which = have, rows
            else:
                which = np.repeat(rows, count)
                first = np.repeat(np.cumsum(count) - count, count)
                at = np.repeat(have, count) + (np.arange(needs[group]) - first).astype(np.int32)
            blocks = self._pool.take(group, needs[group])
            self.table[group][which, at] = blocks
            columns[group, rows] = have + count
            self._pool.epoch[blocks] = self._epoch[which]
            self._grant(group, which, at, blocks, draft)
        room = columns[0, rows] * np.int32(self.block_tokens[0])
        for group in range(1, len(missing)):
            np.minimum(room, columns[group, rows] * np.int32(self.block_tokens[group]), out=room)
        self._rows.room[rows] = room
        return True

    def _grant(
        self, group: int, rows: IntArray, columns: IntArray, blocks: IntArray, draft: Draft
    ) -> None:
        pages = self._pool.pages(group, blocks)
        draft.patch(group, rows, columns, pages)
        draft.zero(group, pages)

    def close(self, row: int) -> None:
        """Release everything `row` holds, last block first."""
        for group, table in enumerate(self.table):
            count = int(self._rows.columns[group, row])
            blocks = table[row, :count]
            held = blocks[blocks > 0][::-1]
            if len(held):
                self._pool.release(held)
            blocks[:] = 0

    def blocks(self, group: int, row: int, start: int, stop: int) -> IntArray:
        """Return the row's blocks in columns start … stop-1."""
        return self.table[group][row, start:stop]

    def check(self) -> None:
        """Raise InvariantError unless the pool's holds are exactly what the tables say."""
        held = np.zeros_like(self._pool.refs)
        for group, table in enumerate(self.table):
            blocks = table[table > 0]
            if (self._pool.group_of[blocks] != group).any():
                raise InvariantError(f"a block of another group is in the table of group {group}")
            np.add.at(held, blocks, 1)
            for row, owner in enumerate(self._rows.owners):
                count = int(self._rows.columns[group, row]) if owner is not None else 0
                if table[row, count:].any():
                    raise InvariantError(f"row {row} has blocks beyond its last column")
        if not np.array_equal(held, self._pool.refs):
            raise InvariantError("a block's holds are not those of the tables")
