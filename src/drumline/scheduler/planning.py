"""Planning a round: the order in which the parts of a scheduler decide.

Whoever was suspended comes back first, then prompts and decodes get their share of one
forward; if that leaves nobody with anything to do, somebody makes way. The parts know
nothing of each other's turns.
"""

from collections.abc import Callable

from drumline.contract.arrays import IntArray
from drumline.contract.plan import AbortReason, Plan
from drumline.core.config import Role
from drumline.scheduler.batches import batch_of
from drumline.scheduler.chunk import Chunk
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.decoding import Decodes
from drumline.scheduler.draft import Draft
from drumline.scheduler.lifecycle import OVER, Move, State
from drumline.scheduler.parts import Parts
from drumline.scheduler.requests import Request
from drumline.scheduler.storage.tier import StorageTier

_BLANK = (*OVER, State.SUBMITTED, State.PREFETCHING, State.BOOTSTRAPPING)
"""The states of requests that will not compute anything on what they have read."""


class Planning:
    """Plans rounds, counted from 1."""

    __slots__ = (
        "_admission",
        "_decoding",
        "_host",
        "_loads",
        "_parts",
        "_peers",
        "_requests",
        "_retraction",
        "_round",
        "_rows",
        "_stop",
        "_storage",
        "config",
        "forwards_allowed",
    )

    def __init__(
        self, config: SchedulerConfig, parts: Parts, stop: Callable[[Request], None]
    ) -> None:
        """`stop` ends a request at once."""
        self.config = config
        """What the next plan goes by."""
        self.forwards_allowed = True
        self._round = 0
        self._parts = parts
        self._stop = stop
        self._admission = parts.admission
        self._decoding = parts.decoding
        self._host = parts.host
        self._loads = parts.loads
        self._peers = parts.peers
        self._requests = parts.requests
        self._retraction = parts.retraction
        self._rows = parts.rows
        self._storage = parts.storage

    def plan(self) -> Plan:
        """Decide the next round."""
        self._round += 1
        self._requests.forget_ended()
        draft = Draft(self._round)
        if self._loads.failed:
            self._distrust(draft)
        self._admission.settle(draft)
        if self._storage is not None:
            self._ask_storage(self._storage, draft)
        if self._host.waiting:
            self._host.store(draft)
        if not self.forwards_allowed:
            return draft.done(None)
        if self._peers is not None:
            self._peers.plan(draft)
        self._retraction.force(draft)
        self._retraction.restore(draft)
        chunks, decodes = self._plan_forward(draft)
        while not chunks and decodes is None and self._retraction.make_way(draft):
            chunks, decodes = self._plan_forward(draft)
        for chunk in chunks:
            if chunk.request.state is State.PREFILLED:
                self._decoding.add(chunk.request)
            if self._storage is not None:
                self._storage.prefetches.leave(chunk.request)
        if self._host.waiting:
            self._host.store(draft)
        named: IntArray | None = None
        if decodes is not None and self.config.stages > 1:
            named = self._rows.last[decodes.rows]
        elif decodes is not None and self._peers is not None:
            named = self._peers.first_tokens(decodes.rows)
        return draft.done(batch_of(chunks, decodes, self._rows, named))

    def _ask_storage(self, storage: StorageTier, draft: Draft) -> None:
        """Plan storage operations, and who waits for them."""
        turns = storage.plan(draft)
        for request in turns.back:
            self._requests.move(request, Move.LEAVE_STORAGE)
            self._admission.bring_back(request)
        for request in turns.aside:
            self._requests.move(request, Move.ASK_STORAGE)
            self._admission.set_aside(request)

    def _plan_forward(self, draft: Draft) -> tuple[list[Chunk], Decodes | None]:
        budget = self.config.max_scheduled_tokens
        decodes: Decodes | None = None
        if self.config.role is Role.DECODE:
            # Prompts cost the forward nothing; whoever decodes has the first choice of blocks.
            if self._decoding.size:
                decodes = self._decoding.plan(draft, budget)
            return self._admission.plan(draft, budget), decodes
        if self.config.mixed_batch:
            if self._decoding.size:
                decodes = self._decoding.plan(draft, budget)
            if decodes is not None:
                budget -= len(decodes.rows) * self.config.decode_tokens
                if self.config.mixed_prefill_tokens is not None:
                    budget = min(budget, self.config.mixed_prefill_tokens)
            return self._admission.plan(draft, budget), decodes
        chunks = self._admission.plan(draft, budget)
        if not chunks and self._decoding.size:
            decodes = self._decoding.plan(draft, budget)
        return chunks, decodes

    def _distrust(self, draft: Draft) -> None:
        """End whoever read pages that were not loaded, and forget all that may build on them.

        What was computed since cannot be told from what was sound before, so that every
        cached prefix goes, in both tiers.
        """
        failed, readers = self._loads.take_failed()
        for request in self._requests.values():
            read = request.sequence in readers or not failed.isdisjoint(request.digests)
            if read and request.state not in _BLANK:
                detail = "pages of its prompt could not be copied back from host memory"
                draft.abort(request.rid, AbortReason.LOAD_FAILED, detail)
                self._stop(request)
        self._parts.pool.disown()
        self._host.disown()
        if self._storage is not None:
            self._storage.distrust()
