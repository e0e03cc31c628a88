"""Suspending decoding requests when the pool is full, and bringing them back.

A suspended request leaves row and blocks at once; its image waits in the snapshot pool. When
there is room again it gets a new row and blocks, the image is copied back, and it decodes on
as if nothing had happened.
"""

from collections.abc import Callable

import numpy as np

from drumline.contract.plan import AbortReason
from drumline.core.errors import InvariantError
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.decoding import Decoding
from drumline.scheduler.draft import Draft
from drumline.scheduler.lifecycle import Move, State
from drumline.scheduler.match import Match
from drumline.scheduler.publication import Publication
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.rows import Rows
from drumline.scheduler.snapshots import Image, Snapshots
from drumline.scheduler.states import StateSlots
from drumline.scheduler.tables import BlockTables
from drumline.scheduler.transfers import Transfers


class Retraction:
    """The suspended requests, and who comes next."""

    __slots__ = (
        "_caching",
        "_decoding",
        "_end",
        "_images",
        "_interval",
        "_lost",
        "_pool",
        "_publication",
        "_requests",
        "_resumed",
        "_rows",
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
        snapshots: Snapshots,
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
        self._transfers = transfers
        self._end = end
        self._snapshots = snapshots
        self._images: dict[str, Image] = {}
        self._lost: list[Request] = []
        self._resumed: dict[str, int] = {}
        """The tokens a request had when it came back; forced away before it has more, it would
        never get on."""

    def __len__(self) -> int:
        return len(self._images)

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
        if not self._snapshots.pool.num_parents > 1:
            return AbortReason.OUT_OF_PAGES, (
                f"none of {self._pool.num_parents - 1} pages is free for a decode, nothing will "
                f"free one for the {self._decoding.size} requests that decode, and there is no "
                "pool to suspend a request to"
            )
        if not self._snapshots.slots:
            return AbortReason.IMAGE_DOES_NOT_FIT, (
                f"{len(self._images)} requests are suspended, as many as may be"
            )
        digests = self._publication.row_digests(request) if self._caching else []
        needs = self._snapshots.needs(request.row, digests)
        if not self._snapshots.pool.fits(needs):
            return AbortReason.IMAGE_DOES_NOT_FIT, (
                f"the image takes {sum(needs)} blocks, the snapshot pool has "
                f"{self._snapshots.pool.empty} free pages"
            )
        return None

    def _suspend(self, request: Request, draft: Draft) -> None:
        row = request.row
        # Nothing is in flight: what the restored row looks back on is known, and is the image.
        self._tables.lines.expire(np.array([row]), draft, settled=True)
        if self._caching:
            self._publication.publish_end(request)
        digests = self._publication.row_digests(request) if self._caching else []
        self._images[request.rid] = self._snapshots.write(request, digests, draft)
        self._requests.move(request, Move.RETRACT)
        self._decoding.leave(request)
        self._tables.close(row)
        self._states.close(row)
        self._rows.give_back(row)
        request.row = 0

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
        still = self._snapshots.still_cached(image)
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
        self._snapshots.read(
            request, image, gone, lambda ok: self._restored(request, image, ok), draft
        )
        self._requests.move(request, Move.RESTORE)
        return True

    def _restored(self, request: Request, image: Image, ok: bool) -> None:
        self._snapshots.drop(image)
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
            self._snapshots.drop(image)

    def check(self) -> None:
        """Raise InvariantError unless whoever is suspended has an image, or lost it."""
        suspended = self._requests.counts[State.RETRACTED] + self._requests.counts[State.RESTORING]
        if suspended != len(self._images) + len(self._lost):
            raise InvariantError(f"{suspended} requests are suspended, {len(self._images)} images")
