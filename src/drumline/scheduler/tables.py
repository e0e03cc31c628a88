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
from drumline.scheduler.index import NOBODY, ONE, ZERO, IndexArray
from drumline.scheduler.match import Match
from drumline.scheduler.rows import Rows


class BlockTables:
    """Each group's table, `table[row, column]`, in pool-wide block numbers."""

    __slots__ = (
        "_page",
        "_pool",
        "_rows",
        "_sizes",
        "_starts",
        "block_tokens",
        "flat",
        "max_tokens",
        "table",
        "windows",
    )

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        page_tokens: int,
        max_tokens: int,
        pool: BlockPool,
        rows: Rows,
    ) -> None:
        size = len(rows.owners)
        self._pool = pool
        self._rows = rows
        self._page = page_tokens
        self.block_tokens = [group.block_tokens for group in groups]
        self.windows = [group.window_tokens for group in groups]
        """Tokens a token of the group looks back on, itself included; None is all."""
        self._sizes: list[IndexArray] = [np.array(tokens) for tokens in self.block_tokens]
        self.table: list[IndexArray] = [
            np.zeros((size, -(-max_tokens // tokens)), np.intp) for tokens in self.block_tokens
        ]
        self.flat: list[IndexArray] = [table.reshape(-1) for table in self.table]
        """The same tables as one line of cells."""
        self._starts: list[IndexArray] = [np.arange(size) * table.shape[1] for table in self.table]
        self.max_tokens = min(
            int(table.shape[1]) * tokens
            for table, tokens in zip(self.table, self.block_tokens, strict=True)
        )
        """Tokens a row has columns for."""

    def cells(self, group: int, rows: IndexArray, columns: IndexArray) -> IndexArray:
        """Return where in the flat table `columns` of `rows` are."""
        cells: IndexArray = self._starts[group][rows] + columns
        return cells

    def first_column(self, group: int, tokens: int) -> int:
        """Return the first column that a token at position `tokens` looks back on."""
        window = self.windows[group]
        if window is None:
            return 0
        return max(tokens - window + 1, 0) // self.block_tokens[group]

    def needs(self, targets: Sequence[int], cached_tokens: int, pages: int) -> list[int]:
        """Return the blocks of each group that `targets[g]` tokens take beyond a match.

        Of the `cached_tokens` that match, those in `pages` full pages are shared.
        """
        needs = []
        for group, (target, size) in enumerate(zip(targets, self.block_tokens, strict=True)):
            first = max(pages * self._page // size, self.first_column(group, cached_tokens))
            needs.append(-(-target // size) - first)
        return needs

    def open(
        self,
        row: int,
        match: Match,
        targets: Sequence[int],
        draft: Draft,
        *,
        restored: bool = False,
    ) -> None:
        """Start `row` with the held blocks of `match`, and room for `targets[g]` tokens.

        Behind the match's pages come copies of its tail; blocks that are to be restored
        are not zeroed up to the match. The pool must have the room.
        """
        for group, target in enumerate(targets):
            hit = match.blocks[group] if match.pages else NOBODY
            live = self.first_column(group, match.tokens)
            count = max(len(hit), live)
            if count:
                self.table[group][row, : len(hit)] = hit
                self._rows.columns[group][row] = count
                self._rows.first[group][row] = live
                draft.patch(
                    group,
                    np.full(count, row, np.int32),
                    np.arange(count, dtype=np.int32),
                    self._pool.pages(group, self.table[group][row, :count]),
                )
            tail = match.tails[group] if match.tails else NOBODY
            kept = -(-match.tokens // self.block_tokens[group]) if restored else 0
            self._grow(group, row, target, draft, tail, kept)

    def grow(self, row: int, targets: Sequence[int], draft: Draft) -> bool:
        """Give `row` room for `targets[g]` tokens; False, and nothing happened, without room."""
        needs = [
            max(-(-target // size) - int(columns[row]), 0)
            for target, size, columns in zip(
                targets, self.block_tokens, self._rows.columns, strict=True
            )
        ]
        if any(needs):
            if not self._pool.make_room(needs):
                return False
            for group, target in enumerate(targets):
                self._grow(group, row, target, draft, NOBODY)
        return True

    def _grow(
        self, group: int, row: int, tokens: int, draft: Draft, tail: IndexArray, kept: int = 0
    ) -> None:
        """Append blocks up to `tokens`, the first of them copies of `tail`.

        Those of columns before `kept` are not zeroed.
        """
        have = int(self._rows.columns[group][row])
        want = -(-tokens // self.block_tokens[group])
        if want <= have:
            return
        blocks = self._pool.take(group, want - have)
        self.table[group][row, have:want] = blocks
        self._rows.columns[group][row] = want
        pages = self._pool.pages(group, blocks)
        draft.patch(
            group,
            np.full(want - have, row, np.int32),
            np.arange(have, want, dtype=np.int32),
            pages,
        )
        copied = len(tail)
        if copied:
            draft.copy(group, self._pool.pages(group, tail), pages[:copied])
        blank = max(copied, kept - have)
        if blank < len(pages):
            draft.zero(group, pages[blank:])

    def row_blocks(self, row: int) -> list[IndexArray]:
        """Return each group's blocks of a row."""
        parts = [
            table[row, : int(columns[row])]
            for table, columns in zip(self.table, self._rows.columns, strict=True)
        ]
        return [part[part > 0] for part in parts]

    def expire(self, rows: IndexArray, draft: Draft) -> None:
        """Give up the blocks that the windows of `rows` have passed."""
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            first = self._rows.first[group]
            passed = np.maximum(self._rows.computed[rows] - (window - 1), 0) // self._sizes[group]
            passed = np.minimum(passed, self._rows.columns[group][rows])
            for row, old, new in zip(
                rows.tolist(), first[rows].tolist(), passed.tolist(), strict=True
            ):
                if new > old:
                    first[row] = new
                    self._drop(group, row, old, new, draft)

    def _drop(self, group: int, row: int, start: int, stop: int, draft: Draft) -> None:
        """Null the columns start … stop-1 of a row."""
        blocks = self.table[group][row, start:stop]
        held = blocks[blocks > 0]
        if len(held):
            self._pool.release(held, int(self._rows.epoch[row]))
        blocks[:] = 0
        draft.patch(
            group,
            np.full(stop - start, row, np.int32),
            np.arange(start, stop, dtype=np.int32),
            np.zeros(stop - start, np.int32),
        )

    def slides(self, rows: IndexArray) -> IndexArray | None:
        """Return how many tokens `rows` have when their next block expires; None: never."""
        due: IndexArray | None = None
        for group, window in enumerate(self.windows):
            if window is not None:
                first = self._rows.first[group][rows]
                mine = (first + ONE) * self._sizes[group] + (window - 1)
                due = mine if due is None else np.minimum(due, mine)
        return due

    def extend(self, rows: IndexArray, tokens: IntArray, draft: Draft) -> bool:
        """Give each of `rows` room for `tokens[i]`, all or, returning False, none."""
        needs, parts = [], []
        for columns, size in zip(self._rows.columns, self._sizes, strict=True):
            have = columns[rows]
            missing = (tokens + (size - ONE)) // size - have
            short = missing > ZERO
            count = np.count_nonzero(short)
            if count < len(rows):
                part = (rows[short], have[short], missing[short])
            else:
                part = (rows, have, missing)
            needs.append(int(part[2].sum()))
            parts.append(part)
        if not self._pool.make_room(needs):
            return False
        for group, (which, have, missing) in enumerate(parts):
            if needs[group]:
                self._append(group, which, have, missing, needs[group], draft)
        return True

    def _append(
        self,
        group: int,
        rows: IndexArray,
        have: IndexArray,
        missing: IndexArray,
        count: int,
        draft: Draft,
    ) -> None:
        """Append `missing[i]` blocks, `count` in all, to rows that have `have[i]` columns."""
        blocks = self._pool.take(group, count)
        self._rows.columns[group][rows] = have + missing
        if count > len(rows):
            first = np.repeat(np.cumsum(missing) - missing, missing)
            have = np.repeat(have, missing) + np.arange(count) - first
            rows = np.repeat(rows, missing)
        self.flat[group][self.cells(group, rows, have)] = blocks
        pages = self._pool.pages(group, blocks)
        draft.patch(group, rows.astype(np.int32), have.astype(np.int32), pages)
        draft.zero(group, pages)

    def room(self, rows: IndexArray) -> IndexArray:
        """Return the tokens that the blocks of `rows` have room for, over all groups."""
        room: IndexArray = self._rows.columns[0][rows] * self._sizes[0]
        for columns, size in zip(self._rows.columns[1:], self._sizes[1:], strict=True):
            np.minimum(room, columns[rows] * size, out=room)
        return room

    def adopt(
        self, group: int, rows: IndexArray, columns: IndexArray, blocks: IndexArray, draft: Draft
    ) -> None:
        """Have `rows` hold `blocks`, cached and of the same content, in place of their own."""
        cells = self.cells(group, rows, columns)
        table = self.flat[group]
        for cell, block in zip(cells.tolist(), blocks.tolist(), strict=True):
            # One by one: two rows may adopt the same block.
            own = table[cell : cell + 1].copy()
            self._pool.hold(np.array([block]))
            self._pool.release(own)
            table[cell] = block
        draft.patch(
            group,
            rows.astype(np.int32),
            columns.astype(np.int32),
            self._pool.pages(group, blocks),
        )

    def make_private(self, row: int, tokens: int, draft: Draft) -> None:
        """Move `row` off the blocks of its partial page, which `tokens` end in, onto copies.

        The pool must have the room.
        """
        for group in range(len(self.table)):
            first, last = self.partial(group, tokens)
            shared = self.table[group][row, first:last].copy()
            private = self._pool.take(group, last - first)
            self.table[group][row, first:last] = private
            self._pool.release(shared, int(self._rows.epoch[row]))
            pages = self._pool.pages(group, private)
            draft.patch(
                group,
                np.full(last - first, row, np.int32),
                np.arange(first, last, dtype=np.int32),
                pages,
            )
            draft.copy(group, self._pool.pages(group, shared), pages)

    def partial(self, group: int, tokens: int) -> tuple[int, int]:
        """Return the live columns, from and to, of the partial page that ends at `tokens`."""
        size = self.block_tokens[group]
        first = max(tokens // self._page * self._page // size, self.first_column(group, tokens))
        return first, -(-tokens // size)

    def close(self, row: int) -> None:
        """Release everything `row` holds, last block first."""
        for group, table in enumerate(self.table):
            count = int(self._rows.columns[group][row])
            blocks = table[row, :count]
            held = blocks[blocks > 0][::-1]
            if len(held):
                self._pool.release(held, int(self._rows.epoch[row]))
            blocks[:] = 0

    def check(self, others: Sequence[IndexArray] = ()) -> None:
        """Raise InvariantError unless the pool's holds are those of the tables and `others`."""
        held = np.zeros_like(self._pool.refs)
        for blocks in others:
            np.add.at(held, blocks, 1)
        for group, table in enumerate(self.table):
            blocks = table[table > 0]
            if (self._pool.group_of[blocks] != group).any():
                raise InvariantError(f"a block of another group is in the table of group {group}")
            np.add.at(held, blocks, 1)
            for row, owner in enumerate(self._rows.owners):
                count = int(self._rows.columns[group][row]) if owner is not None else 0
                if table[row, count:].any():
                    raise InvariantError(f"row {row} has blocks beyond its last column")
        if not np.array_equal(held, self._pool.refs):
            raise InvariantError("a block's holds are not those of the tables")
