"""Images of suspended requests, and the pool of host memory that these are in.

An image is the contents of a row's blocks and what the data plane keeps of the row. Full
pages of it stay in the host tier as far as that has or takes them. Whatever order the
copies take, the plan that gives its blocks away reads them first. Who is suspended, and
when somebody comes back, it does not know.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from drumline.contract.cache import BlockMoves, Restore, Snapshot
from drumline.contract.census import PoolCensus
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.draft import Draft
from drumline.scheduler.host import HostTier, Pages
from drumline.scheduler.index import NOBODY, IndexArray
from drumline.scheduler.prefix import PrefixIndex
from drumline.scheduler.requests import Request
from drumline.scheduler.rows import Rows, Suspended
from drumline.scheduler.states import StateSlots
from drumline.scheduler.tables import BlockTables
from drumline.scheduler.transfers import Transfers


class Image(Struct, eq=False):
    """What a suspended request left: its row's fields, and where its blocks are.

    For the columns from `first[g]` on, `blocks[g]` are blocks of the snapshot pool, or 0
    where `host[g]` has one of the host tier. Its full pages have `digests`, but for those
    that were never findable. `states` are blocks of the snapshot pool, a state group an entry.
    """

    fields: Suspended
    slot: int
    first: list[int]
    digests: list[bytes]
    blocks: list[IndexArray] = []
    host: list[IndexArray] = []
    states: list[int] = []
    writes: int = 0
    """Operations that still write it."""
    failed: bool = False
    wanted: bool = True
    """The request still lives; an image that is not is dropped once nobody writes it."""

    @property
    def landed(self) -> bool:
        return not self.writes


class Snapshots:
    """The images there are, those included that only an operation still reads or writes."""

    __slots__ = (
        "_device",
        "_host",
        "_index",
        "_kept",
        "_rows",
        "_states",
        "_tables",
        "_transfers",
        "pool",
        "slots",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        device: BlockPool,
        index: PrefixIndex,
        rows: Rows,
        tables: BlockTables,
        states: StateSlots,
        host: HostTier,
        transfers: Transfers,
    ) -> None:
        self._device = device
        self._index = index
        self._rows = rows
        self._tables = tables
        self._states = states
        self._host = host
        self._transfers = transfers
        self.pool = BlockPool(
            config.groups, config.num_snapshot_pages, lambda _group, _blocks: None, lambda at: at
        )
        self.slots = deque(range(1, config.max_retracted_requests + 1))
        """Places for what the data plane keeps of a row, that no image has."""
        self._kept: list[Image] = []

    def census(self) -> PoolCensus:
        """Count the snapshot pool's pages."""
        return self.pool.census()

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Return the columns of each group that hold something, from and to."""
        computed = int(self._rows.computed[row])
        return [
            (int(first[row]), -(-computed // size))
            for first, size in zip(self._rows.first, self._tables.block_tokens, strict=True)
        ]

    def needs(self, row: int, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of each group that a row's image takes here, were it made now.

        `digests` name the row's full pages; of those that the host tier has, none.
        """
        spans = self.spans(row)
        needs = [last - first for first, last in spans]
        if digests and len(self._host.index):
            here = self._host.visible(digests)
            needs = [
                need - int(np.count_nonzero(part.reshape(-1)[first:]))
                for need, part, (first, _last) in zip(needs, here, spans, strict=False)
            ]
        return needs + [1] * len(self._states)

    # -- out ----------------------------------------------------------------------

    def write(self, request: Request, digests: list[bytes], draft: Draft) -> Image:
        """Have the image of a request's row made; there must be a slot, and the room.

        The row's blocks may be given away in the same plan.
        """
        row = request.row
        spans = self.spans(row)
        image = Image(
            fields=self._rows.suspend(row),
            slot=self.slots.popleft(),
            first=[first for first, _last in spans],
            digests=digests,
        )
        for group, host in enumerate(self._in_host(image, row, draft)):
            first, last = spans[group]
            image.host.append(np.zeros(last - first, np.intp))
            image.host[group][: len(host)] = host
            beyond = image.host[group] == 0
            image.blocks.append(np.zeros(last - first, np.intp))
            image.blocks[group][beyond] = self.pool.take(group, int(beyond.sum()))
        moves = [
            BlockMoves(
                group,
                self._device.pages(group, self._tables.table[group][row, slice(*span)][theirs > 0]),
                self.pool.pages(group, theirs[theirs > 0]),
            )
            for group, (span, theirs) in enumerate(zip(spans, image.blocks, strict=True))
            if theirs.any()
        ]
        for group, block in enumerate(self._states.carried(row), len(spans)):
            image.states.append(int(self.pool.take(group, 1)[0]))
            moves.append(_move(group, block, self._device, image.states[-1], self.pool))
        self._kept.append(image)
        image.writes += 1
        op_id = self._transfers.begin(lambda ok: self._landed(image, ok), NOBODY)
        draft.cache(Snapshot(op_id, request.rid, row, image.slot, tuple(moves)))
        return image

    def _in_host(self, image: Image, row: int, draft: Draft) -> list[IndexArray]:
        """Hold in the host tier what it has or takes of a row's full pages.

        Returns its blocks by column, from the image's first on, 0 where it has none.
        """
        known = [bool(digest) for digest in image.digests]
        if not self._host.pool.num_parents > 1 or not any(known):
            return [NOBODY for _ in image.first]
        count, blocks = len(known), []
        for group, table in enumerate(self._tables.table):
            slots = self._index.slots[group]
            blocks.append(table[row, : count * slots].reshape(count, slots))
        blocks += [np.zeros((count, 1), np.intp) for _ in range(len(self._states))]
        which = np.flatnonzero(known)
        pages = Pages(
            [image.digests[page] for page in which.tolist()],
            (which + 1) * self._index.page_tokens,
            [part[which] for part in blocks],
        )
        before = len(self._transfers)
        kept = self._host.keep(pages, draft, lambda ok: self._landed(image, ok))
        image.writes += len(self._transfers) - before
        columns = []
        for part, own, first in zip(kept.blocks, blocks, image.first, strict=False):
            whole = np.zeros_like(own)
            whole[which] = part
            columns.append(whole.reshape(-1)[first:])
        return columns

    def _landed(self, image: Image, ok: bool) -> None:
        image.writes -= 1
        image.failed = image.failed or not ok
        if not image.wanted and image.landed:
            self.drop(image)

    def drop(self, image: Image) -> None:
        """Give up an image that no operation touches any more."""
        self._kept.remove(image)
        self.slots.append(image.slot)
        for blocks in image.blocks:
            if blocks.any():
                self.pool.release(blocks[blocks > 0])
        for block in image.states:
            self.pool.release(np.array([block]))
        self._host.release(image.host)

    # -- back ---------------------------------------------------------------------

    def still_cached(self, image: Image) -> list[IndexArray]:
        """Return the device's blocks of an image's full pages by column, 0 where it has none."""
        nodes = self._index.anywhere(image.digests)
        paged = self._index.blocks[: len(image.first)]
        still = [part[nodes].reshape(-1) for part in paged]
        for part, first in zip(still, image.first, strict=True):
            part[:first] = 0
        return still

    def read(
        self,
        request: Request,
        image: Image,
        gone: list[NDArray[np.bool_]],
        ended: Callable[[bool], None],
        draft: Draft,
    ) -> None:
        """Have an image copied to its request's new row, which has blocks for all of it.

        Of full pages, only the columns that are true in `gone`, a group an entry; state
        groups get live blocks of the pool, which has the room. `ended` learns of the end.
        """
        row = request.row
        wanted = []
        for (first, last), absent in zip(self.spans(row), gone, strict=True):
            wanted.append(np.ones(last - first, bool))
            wanted[-1][: max(len(absent) - first, 0)] = absent[first:]
        from_host, copied = self._moves_back(row, image.host, wanted, self._host.pool)
        from_snapshot, others = self._moves_back(row, image.blocks, wanted, self.pool)
        live = self._states.restore(row, draft)
        from_snapshot += tuple(
            _move(group, source, self.pool, block, self._device)
            for group, (source, block) in enumerate(
                zip(image.states, live, strict=True), len(image.first)
            )
        )
        pins = np.concatenate((*copied, *others, np.array(live, np.intp)))
        op_id = self._transfers.begin(ended, pins)
        draft.cache(Restore(op_id, request.rid, row, image.slot, from_host, from_snapshot))

    def _moves_back(
        self, row: int, blocks: list[IndexArray], wanted: list[IndexArray], pool: BlockPool
    ) -> tuple[tuple[BlockMoves, ...], list[IndexArray]]:
        """Return the copies of an image's `blocks` of `pool` that are wanted, and their targets."""
        moves, targets = [], []
        for group, (first, last) in enumerate(self.spans(row)):
            which = wanted[group] & (blocks[group] > 0)
            if which.any():
                mine = self._tables.table[group][row, first:last][which]
                sources = pool.pages(group, blocks[group][which])
                moves.append(BlockMoves(group, sources, self._device.pages(group, mine)))
                targets.append(mine)
        return tuple(moves), targets

    def host_blocks(self) -> list[IndexArray]:
        """Return what images hold of the host tier, a group of an image an entry."""
        return [blocks for image in self._kept for blocks in image.host]


def _move(group: int, block: int, pool: BlockPool, onto: int, other: BlockPool) -> BlockMoves:
    """Return the copy of one block of `pool` onto one of another pool."""
    return BlockMoves(
        group, pool.pages(group, np.array([block])), other.pages(group, np.array([onto]))
    )
