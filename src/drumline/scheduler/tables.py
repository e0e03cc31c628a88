"""The block tables: which block holds which part of which row, in every group that has tokens.

Column i of a group's table covers tokens i*g … (i+1)*g-1 of the row, g being the
group's block size. Every change is added to the draft of the plan as a patch; the
data plane's own tables change by those alone.
"""

from collections.abc import Sequence

import numpy as np

from drumline.contract.specs import CacheGroup
from drumline.core.errors import InvariantError
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.draft import Draft
from drumline.scheduler.index import NOBODY, IndexArray, blank
from drumline.scheduler.lines import Lines
from drumline.scheduler.match import Match
from drumline.scheduler.rows import Rows


class BlockTables:
    """Each group's table, `table[row, column]`, in pool-wide block numbers."""

    __slots__ = (
        "_no_others",
        "_page",
        "_pool",
        "_rows",
        "_table_of",
        "_unsure",
        "block_tokens",
        "lines",
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
        unsure_tokens: int = 0,
        other_groups: int = 0,
    ) -> None:
        """Take over the first groups of `pool`; the others' blocks are in no table here."""
        self._no_others = [0] * other_groups
        size = len(rows.owners)
        self._unsure = unsure_tokens
        """Tokens that forwards in flight may yet turn out to have added less than planned."""
        self._pool = pool
        self._rows = rows
        self._page = page_tokens
        self.block_tokens = [group.block_tokens for group in groups]
        self.windows = [group.window_tokens for group in groups]
        """Tokens a token of the group looks back on, itself included; None is all."""
        widths = [-(-max_tokens // tokens) for tokens in self.block_tokens]
        cells = blank(size * sum(widths))
        ends = np.cumsum([size * width for width in widths])
        self.table: list[IndexArray] = [
            part.reshape(size, width)
            for part, width in zip(np.split(cells, ends[:-1]), widths, strict=True)
        ]
        self._table_of = [table.data for table in self.table]
        """The same memory, for who looks at single cells."""
        self.lines = Lines(
            groups, self.table, cells, page_tokens, unsure_tokens, other_groups, pool, rows
        )
        """For who looks at many rows at once."""
        self.max_tokens = min(
            width * tokens for width, tokens in zip(widths, self.block_tokens, strict=True)
        )
        """Tokens a row has columns for."""

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

        Behind the match's pages come copies of its tail, or blocks that its tail is to be
        loaded to; those and what is to be restored is not zeroed. The pool must have the room.
        """
        for group, target in enumerate(targets):
            hit = match.blocks[group] if match.pages else NOBODY
            live = self.first_column(group, match.tokens)
            count = max(len(hit), live)
            if count:
                self.table[group][row, : len(hit)] = hit
                self._rows.columns_of[group][row] = count
                self._rows.first_of[group][row] = live
            tail = match.tails[group] if match.tails else NOBODY
            kept = -(-match.tokens // self.block_tokens[group]) if restored else 0
            self._grow(group, row, target, draft, tail, kept)
            self._show(group, row, 0, draft)

    def grow(
        self, row: int, targets: Sequence[int], draft: Draft, others: Sequence[int] = ()
    ) -> bool:
        """Give `row` room for `targets[g]` tokens; False, and nothing happened, without room.

        There is then room for `others` too, blocks of the groups that have no table here.
        """
        needs = [
            max(-(-target // size) - columns[row], 0)
            for target, size, columns in zip(
                targets, self.block_tokens, self._rows.columns_of, strict=True
            )
        ]
        others = others or self._no_others
        if any(needs) or any(others):
            if not self._pool.make_room([*needs, *others]):
                return False
            for group, (need, target) in enumerate(zip(needs, targets, strict=True)):
                if need == 1:
                    self._append_one(group, row, draft)
                elif need:
                    self._grow(group, row, target, draft, NOBODY)
                    self._show(group, row, self._rows.columns_of[group][row] - need, draft)
        return True

    def _grow(
        self, group: int, row: int, tokens: int, draft: Draft, tail: IndexArray, kept: int = 0
    ) -> None:
        """Append blocks up to `tokens`, the first of them copies of `tail` where it has any.

        Those of columns before `kept` are not zeroed, nor those that `tail` stands for. The
        plan does not show them yet.
        """
        have = self._rows.columns_of[group][row]
        want = -(-tokens // self.block_tokens[group])
        if want <= have:
            return
        blocks = self._pool.take(group, want - have)
        self.table[group][row, have:want] = blocks
        self._rows.columns_of[group][row] = want
        pages = self._pool.pages(group, blocks)
        copied = len(tail)
        if copied:
            here = np.flatnonzero(tail)
            if len(here):
                draft.copy(group, self._pool.pages(group, tail[here]), pages[here])
        blank = max(copied, kept - have)
        if blank < len(pages):
            draft.zero(group, pages[blank:])

    def _append_one(self, group: int, row: int, draft: Draft) -> None:
        """Append one new block to a row."""
        column = self._rows.columns_of[group][row]
        block, page = self._pool.take_one(group)
        self._table_of[group][row, column] = block
        self._rows.columns_of[group][row] = column + 1
        rows, columns, pages = np.array(((row,), (column,), (page,)), np.int32)
        draft.patch(group, rows, columns, pages)
        draft.zero(group, pages)

    def _show(self, group: int, row: int, first: int, draft: Draft) -> None:
        """Have the plan carry a row's columns from `first` on."""
        last = self._rows.columns_of[group][row]
        draft.patch(
            group,
            np.full(last - first, row, np.int32),
            np.arange(first, last, dtype=np.int32),
            self._pool.pages(group, self.table[group][row, first:last]),
        )

    def row_blocks(self, row: int) -> list[IndexArray]:
        """Return each group's blocks of a row."""
        parts = [
            table[row, : columns[row]]
            for table, columns in zip(self.table, self._rows.columns, strict=True)
        ]
        return [part[part > 0] for part in parts]

    def page_cells(self, row: int, end: int) -> list[list[int]]:
        """Return each group's blocks of the page of `row` that ends at `end`."""
        page = []
        for cells, size in zip(self._table_of, self.block_tokens, strict=True):
            behind = end // size
            page.append([cells[row, at] for at in range(behind - self._page // size, behind)])
        return page

    def passed(self, row: int) -> bool:
        """Whether a window of `row` has passed a block that is still there."""
        fields = self._rows
        for group, (window, size) in enumerate(zip(self.windows, self.block_tokens, strict=True)):
            if window is not None:
                live = (fields.computed_of[row] - self._unsure - window + 1) // size
                if min(live, fields.columns_of[group][row]) > fields.first_of[group][row]:
                    return True
        return False

    def last(self, row: int) -> int:
        """Return the tokens `row` has when it next needs or gives up a block."""
        fields = self._rows
        ends: list[int] = []
        for group, (window, size) in enumerate(zip(self.windows, self.block_tokens, strict=True)):
            ends.append(fields.columns_of[group][row] * size)
            if window is not None:
                ends.append((fields.first_of[group][row] + 1) * size + window - 1)
        return min(ends)

    def adopt(
        self, group: int, rows: IndexArray, columns: IndexArray, blocks: IndexArray, draft: Draft
    ) -> None:
        """Have `rows` hold `blocks`, cached and of the same content, in place of their own."""
        table = self.table[group]
        for row, column, block in zip(
            rows.tolist(), columns.tolist(), blocks.tolist(), strict=True
        ):
            # One by one: two rows may adopt the same block.
            own = table[row, column : column + 1].copy()
            self._pool.hold(np.array([block]))
            self._pool.release(own)
            table[row, column] = block
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
            blocks = table[row, : self._rows.columns_of[group][row]]
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
                count = self._rows.columns_of[group][row] if owner is not None else 0
                if table[row, count:].any():
                    raise InvariantError(f"row {row} has blocks beyond its last column")
        if not np.array_equal(held, self._pool.refs):
            raise InvariantError("a block's holds are not those of the tables")
