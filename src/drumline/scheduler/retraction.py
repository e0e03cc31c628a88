"""Suspending decoding requests when the pool is full, and bringing them back.

A suspended request leaves row and blocks at once; its image, the blocks' contents and
what the data plane keeps of its row, waits in the snapshot pool. When there is room
again it gets a new row and blocks, the image is copied back, and it decodes on as if
nothing had happened. Whatever order the copies take, the plan that gives its blocks
away reads them first.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
from msgspec import Struct

from drumline.contract.cache import BlockMoves, Restore, Snapshot
from drumline.contract.census import PoolCensus
from drumline.contract.plan import AbortReason
from drumline.core.errors import InvariantError
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.decoding import Decoding
from drumline.scheduler.draft import Draft
from drumline.scheduler.host import HostTier, Pages
from drumline.scheduler.index import NOBODY, IndexArray
from drumline.scheduler.lifecycle import Move, State
from drumline.scheduler.match import Match
from drumline.scheduler.prefix import PrefixIndex
from drumline.scheduler.publication import Publication
from drumline.scheduler.requests import Request, RequestTable
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


class Retraction:
    """The suspended requests, their images, and the pool these are in."""

    __slots__ = (
        "_caching",
        "_decoding",
        "_end",
        "_host",
        "_images",
        "_index",
        "_interval",
        "_kept",
        "_lost",
        "_pool",
        "_publication",
        "_requests",
        "_resumed",
        "_rows",
        "_slots",
        "_snapshots",
        "_states",
        "_tables",
        "_transfers",
        "_width",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        requests: RequestTable,
        rows: Rows,
        pool: BlockPool,
        tables: BlockTables,
        states: StateSlots,
        publication: Publication,
        decoding: Decoding,
        index: PrefixIndex,
        host: HostTier,
        transfers: Transfers,
        end: Callable[[Request, Move], None],
    ) -> None:
        self._caching = config.prefix_caching
        self._interval = config.debug_force_retraction_interval
        self._width = config.decode_tokens
        self._requests = requests
        self._rows = rows
        self._pool = pool
        self._tables = tables
        self._states = states
        self._publication = publication
        self._decoding = decoding
        self._index = index
        self._host = host
        self._transfers = transfers
        self._end = end
        self._snapshots = BlockPool(
            config.groups, config.num_snapshot_pages, lambda _group, _blocks: None, lambda at: at
        )
        self._slots = deque(range(1, config.max_retracted_requests + 1))
        self._images: dict[str, Image] = {}
        self._kept: list[Image] = []
        """Those, and the images that an operation still reads or writes."""
        self._lost: list[Request] = []
        self._resumed: dict[str, int] = {}
        """The tokens a request had when it came back; forced away before it has more, it would
        never get on."""

    def __len__(self) -> int:
        return len(self._images)

    def census(self) -> PoolCensus:
        """Count the snapshot pool's pages."""
        return self._snapshots.census()

    def known_tokens(self, rid: str) -> int:
        """Return the tokens of a request that was suspended; 0 if it is not."""
        image = self._images.get(rid)
        return 0 if image is None else image.fields.known

    # -- out ----------------------------------------------------------------------

    def make_way(self, draft: Draft) -> bool:
        """Suspend or abort a request because no row can decode; False if none can be.

        The request that frees most goes; without a place for its image, the newest is
        aborted instead.
        """
        if not self._decoding.stuck or self._transfers.pinning:
            return False
        if self._requests.counts[State.RESTORING]:
            return False
        victim = self._victim()
        if victim is None:
            return False
        refusal = self._refusal(victim)
        if refusal is None:
            self._suspend(victim, draft)
            return True
        newest = self._decoding.newest()
        if self._rows.outstanding[newest.row]:
            return False
        draft.abort(newest.rid, *refusal)
        self._end(newest, Move.ABORT)
        return True

    def force(self, draft: Draft) -> None:
        """Suspend a request every so many plans, where a test asked for that."""
        if not self._interval:
            return
        if draft.round % self._interval == 0:
            victim = self._victim(forced=True)
            if victim is not None and self._refusal(victim) is None:
                self._decoding.hold_back(victim)
        for victim in self._decoding.held_back():
            # Its last result may be under way; it is suspended when that has come.
            if not self._rows.outstanding[victim.row]:
                if self._refusal(victim) is None:
                    self._suspend(victim, draft)
                else:
                    self._decoding.let_go(victim)

    def _victim(self, forced: bool = False) -> Request | None:
        """Return the decoding request that would free most, the newest of equals.

        Only those that no result is under way for, or, if forced, that got on since they
        were suspended last.
        """
        best: Request | None = None
        most = -1
        for request in self._decoding.requests():
            if forced:
                if self._rows.known[request.row] <= self._resumed.get(request.rid, 0):
                    continue
            elif self._rows.outstanding[request.row]:
                continue
            row = request.row
            blocks = np.concatenate((*self._tables.row_blocks(row), self._states.blocks(row)))
            exclusive = len(self._pool.parents(blocks[self._pool.refs[blocks] == 1]))
            if exclusive >= most:
                best, most = request, exclusive
        return best

    def _refusal(self, request: Request) -> tuple[AbortReason, str] | None:
        """Return why there is no place for the request's image, or None."""
        if not self._snapshots.num_parents > 1:
            return AbortReason.OUT_OF_PAGES, (
                f"none of {self._pool.num_parents - 1} pages is free for a decode, nothing will "
                f"free one for the {self._decoding.size} requests that decode, and there is no "
                "pool to suspend a request to"
            )
        if not self._slots:
            return AbortReason.IMAGE_DOES_NOT_FIT, (
                f"{len(self._images)} requests are suspended, as many as may be"
            )
        needs = [last - first for first, last in self._spans(request.row)]
        if self._caching and len(self._host.index):
            here = self._host.visible(self._publication.row_digests(request))
            needs = [
                need - int(np.count_nonzero(part.reshape(-1)[first:]))
                for need, part, (first, _last) in zip(
                    needs, here, self._spans(request.row), strict=False
                )
            ]
        needs += [1] * len(self._states)
        if not self._snapshots.fits(needs):
            return AbortReason.IMAGE_DOES_NOT_FIT, (
                f"the image takes {sum(needs)} blocks, the snapshot pool has "
                f"{self._snapshots.empty} free pages"
            )
        return None

    def _spans(self, row: int) -> list[tuple[int, int]]:
        """Return the columns of each group that hold something, from and to."""
        computed = int(self._rows.computed[row])
        return [
            (int(first[row]), -(-computed // size))
            for first, size in zip(self._rows.first, self._tables.block_tokens, strict=True)
        ]

    def _suspend(self, request: Request, draft: Draft) -> None:
        row = request.row
        # Nothing is in flight: what the restored row looks back on is known, and is the image.
        self._tables.expire(np.array([row]), draft, settled=True)
        if self._caching:
            self._publication.publish_end(request)
        spans = self._spans(row)
        image = Image(
            fields=self._rows.suspend(row),
            slot=self._slots.popleft(),
            first=[first for first, _last in spans],
            digests=self._publication.row_digests(request) if self._caching else [],
        )
        for group, host in enumerate(self._in_host(image, row, draft)):
            first, last = spans[group]
            image.host.append(np.zeros(last - first, np.intp))
            image.host[group][: len(host)] = host
            beyond = image.host[group] == 0
            image.blocks.append(np.zeros(last - first, np.intp))
            image.blocks[group][beyond] = self._snapshots.take(group, int(beyond.sum()))
        moves = [
            BlockMoves(
                group,
                self._pool.pages(group, self._tables.table[group][row, slice(*span)][theirs > 0]),
                self._snapshots.pages(group, theirs[theirs > 0]),
            )
            for group, (span, theirs) in enumerate(zip(spans, image.blocks, strict=True))
            if theirs.any()
        ]
        for group, block in enumerate(self._states.carried(row), len(spans)):
            image.states.append(int(self._snapshots.take(group, 1)[0]))
            moves.append(self._move(group, block, self._pool, image.states[-1], self._snapshots))
        self._images[request.rid] = image
        self._kept.append(image)
        image.writes += 1
        op_id = self._transfers.begin(lambda ok: self._landed(image, ok), NOBODY)
        draft.cache(Snapshot(op_id, request.rid, row, image.slot, tuple(moves)))
        self._requests.move(request, Move.RETRACT)
        self._decoding.leave(request)
        self._tables.close(row)
        self._states.close(row)
        self._rows.give_back(row)
        request.row = 0

    @staticmethod
    def _move(group: int, block: int, pool: BlockPool, onto: int, other: BlockPool) -> BlockMoves:
        """Return the copy of one block of `pool` onto one of another pool."""
        return BlockMoves(
            group, pool.pages(group, np.array([block])), other.pages(group, np.array([onto]))
        )

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
            self._drop(image)

    def _drop(self, image: Image) -> None:
        self._kept.remove(image)
        self._slots.append(image.slot)
        for blocks in image.blocks:
            if blocks.any():
                self._snapshots.release(blocks[blocks > 0])
        for block in image.states:
            self._snapshots.release(np.array([block]))
        self._host.release(image.host)

    # -- back ---------------------------------------------------------------------

    def restore(self, draft: Draft) -> None:
        """Bring suspended requests back, the oldest first, as far as there is room."""
        for lost in list(self._lost):
            detail = "its image could not be copied back"
            draft.abort(lost.rid, AbortReason.IMAGE_DOES_NOT_FIT, detail)
            self._end(lost, Move.ABORT)
        for rid, image in list(self._images.items()):
            request = self._requests.get(rid)
            if request is None or request.state is not State.RETRACTED or not image.landed:
                continue
            if image.failed:
                detail = "its image could not be written when it was suspended"
                draft.abort(rid, AbortReason.IMAGE_DOES_NOT_FIT, detail)
                self._end(request, Move.ABORT)
            elif not self._bring_back(request, image, draft):
                return

    def _bring_back(self, request: Request, image: Image, draft: Draft) -> bool:
        computed = image.fields.computed
        targets = [computed + self._width] * len(image.first)
        if not self._rows.free:
            return False
        still = self._still_cached(image)
        held = [part[part > 0] for part in still]
        for blocks in held:
            self._pool.hold(blocks)
        # Leave those that decode a block each, lest one of them is suspended for this one.
        spare = self._decoding.size
        needs = [
            need + spare - len(blocks)
            for need, blocks in zip(self._tables.needs(targets, computed, 0), held, strict=True)
        ] + self._states.next_needs
        if not self._pool.make_room(needs):
            for blocks in held:
                self._pool.release(blocks)
            return False
        gone = [part == 0 for part in still]
        for group, (part, first) in enumerate(zip(still, image.first, strict=True)):
            gone[group][:first] = False
            part[gone[group]] = self._pool.take(group, int(gone[group].sum()))
        row = request.row = self._rows.take(request)
        self._rows.resume(row, image.fields)
        draft.bind(row, int(self._rows.generation[row]), request.rid)
        match = Match(len(image.digests), computed, 0, 0, still, [])
        self._tables.open(row, match, targets, draft, restored=True)
        wanted = []
        for (first, last), absent in zip(self._spans(row), gone, strict=True):
            wanted.append(np.ones(last - first, bool))
            wanted[-1][: max(len(absent) - first, 0)] = absent[first:]
        from_host, copied = self._moves_back(row, image.host, wanted, self._host.pool)
        from_snapshot, others = self._moves_back(row, image.blocks, wanted, self._snapshots)
        live = self._states.restore(row, draft)
        from_snapshot += tuple(
            self._move(group, source, self._snapshots, block, self._pool)
            for group, (source, block) in enumerate(
                zip(image.states, live, strict=True), len(image.first)
            )
        )
        pins = np.concatenate((*copied, *others, np.array(live, np.intp)))
        op_id = self._transfers.begin(lambda ok: self._restored(request, image, ok), pins)
        draft.cache(Restore(op_id, request.rid, row, image.slot, from_host, from_snapshot))
        self._requests.move(request, Move.RESTORE)
        return True

    def _still_cached(self, image: Image) -> list[IndexArray]:
        """Return the device's blocks of an image's full pages by column, 0 where it has none."""
        nodes = self._index.anywhere(image.digests)
        paged = self._index.blocks[: len(image.first)]
        still = [part[nodes].reshape(-1) for part in paged]
        for part, first in zip(still, image.first, strict=True):
            part[:first] = 0
        return still

    def _moves_back(
        self, row: int, blocks: list[IndexArray], wanted: list[IndexArray], pool: BlockPool
    ) -> tuple[tuple[BlockMoves, ...], list[IndexArray]]:
        """Return the copies of an image's `blocks` of `pool` that are wanted, and their targets."""
        moves, targets = [], []
        for group, (first, last) in enumerate(self._spans(row)):
            which = wanted[group] & (blocks[group] > 0)
            if which.any():
                mine = self._tables.table[group][row, first:last][which]
                sources = pool.pages(group, blocks[group][which])
                moves.append(BlockMoves(group, sources, self._pool.pages(group, mine)))
                targets.append(mine)
        return tuple(moves), targets

    def host_blocks(self) -> list[IndexArray]:
        """Return what images hold of the host tier, a group of an image an entry."""
        return [blocks for image in self._kept for blocks in image.host]

    def _restored(self, request: Request, image: Image, ok: bool) -> None:
        self._drop(image)
        if not image.wanted:
            return
        del self._images[request.rid]
        if ok:
            self._requests.move(request, Move.RESTORED)
            self._resumed[request.rid] = int(self._rows.known[request.row])
            self._decoding.resume(request)
        else:
            self._lost.append(request)

    def leave(self, request: Request) -> None:
        """Forget a request that ended; its image goes when no operation touches it."""
        if request in self._lost:
            self._lost.remove(request)
        self._resumed.pop(request.rid, None)
        image = self._images.pop(request.rid, None)
        if image is None:
            return
        image.wanted = False
        if image.landed and not request.row:
            self._drop(image)

    def check(self) -> None:
        """Raise InvariantError unless every snapshot page and slot is accounted for."""
        self._snapshots.check()
        suspended = self._requests.counts[State.RETRACTED] + self._requests.counts[State.RESTORING]
        if suspended != len(self._images) + len(self._lost):
            raise InvariantError(f"{suspended} requests are suspended, {len(self._images)} images")
