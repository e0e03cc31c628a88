"""Many rows' lines of the block tables at once, those of all groups together.

A row's line of a group's table goes by one number, the group times the rows of the pool plus
the row; so what is known of lines is found at once for all groups, as arrays of
[group, row]. Of a single group that dimension is left out, as it costs as much as an
operation. Lines that are picked out stand group after group.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from drumline.contract.specs import CacheGroup
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.draft import Draft
from drumline.scheduler.index import ONE, ZERO, IndexArray, every, scalar, some
from drumline.scheduler.rows import Rows


class Lines:
    """Lets lines grow, and windows slide over them."""

    __slots__ = (
        "_cells",
        "_columns",
        "_count",
        "_first",
        "_groups",
        "_lasting",
        "_limit",
        "_no_others",
        "_page_start",
        "_part_sizes",
        "_parts",
        "_passing",
        "_pool",
        "_row_of",
        "_rows",
        "_size",
        "_sizes",
        "_sliding",
        "_sliding_sizes",
        "_smallest",
        "_start",
        "_unsure",
    )

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        tables: Sequence[IndexArray],
        cells: IndexArray,
        page_tokens: int,
        unsure_tokens: int,
        other_groups: int,
        pool: BlockPool,
        rows: Rows,
    ) -> None:
        """`cells` is the memory of the groups' `tables`, one after the other.

        Forwards in flight may yet turn out to have added `unsure_tokens` less than planned.
        """
        size = len(rows.owners)
        sizes = [group.block_tokens for group in groups]
        sliding = [
            (at, group.window_tokens, group.block_tokens)
            for at, group in enumerate(groups)
            if group.window_tokens is not None
        ]
        self._cells = cells
        self._pool = pool
        self._rows = rows
        self._unsure = scalar(unsure_tokens)
        self._no_others = [0] * other_groups
        self._size = size
        self._count = len(sizes)
        self._columns = rows.columns.reshape(-1)
        self._first = rows.first.reshape(-1)
        self._row_of = np.tile(np.arange(size), len(sizes))
        ends = np.cumsum([0, *(table.size for table in tables)])
        starts = [
            end + np.arange(size) * table.shape[1] for end, table in zip(ends, tables, strict=False)
        ]
        self._start: IndexArray = np.concatenate(starts)
        """Where each line starts in the cells."""
        self._groups = _operand([at * size for at in range(len(sizes))])
        self._sizes = _operand(sizes)
        self._smallest = min(sizes)
        self._limit = scalar(
            min(table.shape[1] * tokens for table, tokens in zip(tables, sizes, strict=True))
        )
        self._sliding = _operand([at * size for at, _window, _tokens in sliding])
        self._sliding_sizes = _operand([tokens for _at, _window, tokens in sliding])
        self._passing = _operand([unsure_tokens + window - 1 for _at, window, _tokens in sliding])
        """Tokens a row may have while a window has not passed a token yet."""
        self._lasting = _operand([tokens + window - 1 for _at, window, tokens in sliding])
        """Tokens it has when the window has passed the first block."""
        parts = [page_tokens // tokens for tokens in sizes]
        self._parts = np.cumsum([0, *parts]).tolist()
        """Of the parts that a page has in all groups, the first of each group."""
        self._part_sizes = _operand([sizes[at] for at, n in enumerate(parts) for _ in range(n)])
        self._page_start: IndexArray = np.array(
            [starts[at] - back for at, n in enumerate(parts) for back in range(n, 0, -1)]
        )
        """Where a page's parts would be that ends where a row starts, [part, row]."""

    def page_blocks(self, rows: IndexArray, ends: IndexArray) -> list[IndexArray]:
        """Return each group's blocks of the pages of `rows` that end at `ends`, page by page."""
        blocks = self._cells[self._page_start.take(rows, 1) + ends // self._part_sizes]
        if len(blocks) == self._count:
            return [*blocks]
        return [blocks[first:behind].T.reshape(-1) for first, behind in pairwise(self._parts)]

    def expire(self, rows: IndexArray, draft: Draft, *, settled: bool = False) -> None:
        """Give up the blocks that the windows of `rows` have passed.

        Unless their tokens are `settled`, some may yet turn out to have been rejected.
        """
        if not self._sliding.size:
            return
        computed = self._rows.computed[rows]
        if settled:
            computed += self._unsure
        lines = self._sliding + rows
        passed = (computed - self._passing) // self._sliding_sizes
        live = np.minimum(passed, self._columns[lines])
        old = self._first[lines]
        slid = live > old
        if some(slid):
            lines, live, old = lines[slid], live[slid], old[slid]
            self._first[lines] = live
            self._drop(*_spread(lines, old, live - old), draft)

    def _drop(self, lines: IndexArray, columns: IndexArray, draft: Draft) -> None:
        """Null the cells (lines[i], columns[i])."""
        cells = self._start[lines] + columns
        blocks = self._cells[cells]
        self._cells[cells] = ZERO
        rows = self._row_of[lines]
        epochs, held = self._rows.epoch[rows], blocks > ZERO
        if not every(held):
            blocks, epochs = blocks[held], epochs[held]
        self._pool.release_all(blocks, epochs)
        shown, where = rows.astype(np.int32), columns.astype(np.int32)
        for group, part in self._by_group(lines):
            owners = shown[part]
            draft.patch(group, owners, where[part], np.zeros(len(owners), np.int32))

    def _by_group(self, lines: IndexArray) -> Iterator[tuple[int, slice]]:
        """Return the groups of `lines`, and where each one's are."""
        if lines.item(0) // self._size == lines.item(-1) // self._size:
            yield lines.item(0) // self._size, slice(None)
            return
        groups = lines // self._size
        ends = np.searchsorted(groups, np.arange(self._count + 1)).tolist()
        for group, (first, behind) in enumerate(pairwise(ends)):
            if first < behind:
                yield group, slice(first, behind)

    def extend(self, rows: IndexArray, tokens: IndexArray, draft: Draft) -> bool:
        """Give each of `rows` room for `tokens`, a scalar, more, all or, returning False, none.

        False also where a row would have more than fit into it.
        """
        target = self._rows.computed[rows] + tokens
        if some(target > self._limit):
            return False
        lines = self._groups + rows
        columns = self._columns[lines]
        short = columns * self._sizes < target
        if tokens.item() > self._smallest:
            counts = np.maximum(-(-target // self._sizes) - columns, ZERO)
            needs = [int(part.sum()) for part in counts.reshape(self._count, -1)]
            lines, columns = _spread(lines[short], columns[short], counts[short])
        else:
            marks, count = short.tobytes(), len(rows)
            needs = [marks.count(1, at, at + count) for at in range(0, len(marks), count)]
            if sum(needs) == len(marks):
                lines, columns = lines.reshape(-1), columns.reshape(-1)
            else:
                lines, columns = lines[short], columns[short]
        if not self._pool.make_room(needs + self._no_others):
            return False
        if len(lines):
            self._append(lines, columns, needs, draft)
        return True

    def _append(
        self, lines: IndexArray, columns: IndexArray, needs: Sequence[int], draft: Draft
    ) -> None:
        """Put new blocks, `needs[g]` of group g, into the cells (lines[i], columns[i]).

        A line's are in order.
        """
        blocks, pages = self._pool.take_each(needs)
        self._cells[self._start[lines] + columns] = blocks
        self._columns[lines] = columns + ONE
        rows, where = self._row_of[lines].astype(np.int32), columns.astype(np.int32)
        first = 0
        for group, need in enumerate(needs):
            if need:
                part = slice(first, first + need)
                draft.patch(group, rows[part], where[part], pages[part])
                draft.zero(group, pages[part])
                first += need

    def lasts(self, rows: IndexArray) -> IndexArray:
        """Return the tokens each of `rows` has when it next needs or gives up a block."""
        until = _least(self._columns[self._groups + rows] * self._sizes)
        if self._sliding.size:
            passed = self._first[self._sliding + rows] * self._sliding_sizes + self._lasting
            until = np.minimum(until, _least(passed))
        return until


def _operand(values: Sequence[int]) -> IndexArray:
    """Return `values`, an entry a group, to reckon with arrays of [group, row].

    Of one number, no more than that: it costs half.
    """
    if len(set(values)) == 1:
        return scalar(values[0])
    return np.array(values, np.intp)[:, None]


def _least(parts: IndexArray) -> IndexArray:
    """Return the least of all groups, of each row."""
    least: IndexArray = parts if parts.ndim == 1 else np.minimum.reduce(parts)
    return least


def _spread(
    lines: IndexArray, first: IndexArray, counts: IndexArray
) -> tuple[IndexArray, IndexArray]:
    """Return lines and columns of the cells `first[i]` … `first[i]+counts[i]-1` of `lines[i]`."""
    if every(counts == ONE):
        return lines, first
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(lines, counts), np.repeat(first, counts) + np.arange(len(starts)) - starts
