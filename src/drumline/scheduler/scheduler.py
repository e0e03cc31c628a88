"""The scheduler: submit requests, advance by events, plan rounds.

It owns the order in which the parts of a round's planning are called, and knows what
each part must learn when a request ends. The parts know nothing of each other's
callers.
"""

from collections.abc import Callable, Sequence
from typing import assert_never, get_args

from msgspec import UNSET

from drumline.contract.arrays import IntArray
from drumline.contract.cache import CacheAck
from drumline.contract.census import Census
from drumline.contract.internal_state import Adjustments
from drumline.contract.kv_events import KvEvent
from drumline.contract.plan import AbortReason, Plan
from drumline.contract.storage import StorageDone
from drumline.core.config import Role
from drumline.scheduler.admission import Admission, Chunk
from drumline.scheduler.batches import batch_of
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.capacity import max_request_tokens
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.decoding import Decodes, Decoding
from drumline.scheduler.draft import Draft
from drumline.scheduler.events import (
    Aborted,
    Event,
    Finished,
    HeadEvent,
    IllegalTransitionError,
    RequestSpec,
    Reserved,
    Results,
    Sizes,
    StorageDetached,
    StorageStats,
    Tick,
)
from drumline.scheduler.explanation import explain
from drumline.scheduler.host import HostTier
from drumline.scheduler.index import IndexArray
from drumline.scheduler.kv_events import KvEvents
from drumline.scheduler.lifecycle import Move, State
from drumline.scheduler.matching import Matcher
from drumline.scheduler.peers import PeerEvent, Peers
from drumline.scheduler.prefix import PrefixIndex
from drumline.scheduler.publication import Publication
from drumline.scheduler.receiving import Receiving
from drumline.scheduler.refusal import crowded, refusal
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.results import Commits
from drumline.scheduler.retraction import Retraction
from drumline.scheduler.rows import Rows
from drumline.scheduler.sending import Sending
from drumline.scheduler.states import StateSlots
from drumline.scheduler.storage.tier import StorageTier, storage_tier
from drumline.scheduler.tables import BlockTables
from drumline.scheduler.transfers import Transfers
from drumline.scheduler.views import RowViews

_OVER = (State.FINISHING, State.FINISHED, State.RETIRING)
"""The states of requests that are over, and may hold something still."""

_BLANK = (*_OVER, State.SUBMITTED, State.PREFETCHING, State.BOOTSTRAPPING)
"""The states of requests that will not compute anything on what they have read."""


class Scheduler:
    """Decides which requests run, in which blocks. A pure function of its calls.

    Calls come as `submit`, `advance_head`, `plan`, `advance`, in rounds; plans are
    counted from 1. Collective: the ranks of a replica make the same calls.
    """

    __slots__ = (
        "_admission",
        "_apply",
        "_commits",
        "_config",
        "_decoding",
        "_forwards_allowed",
        "_host",
        "_index",
        "_kv_events",
        "_most_scheduled_tokens",
        "_peers",
        "_pool",
        "_publication",
        "_requests",
        "_retraction",
        "_round",
        "_rows",
        "_states",
        "_storage",
        "_submitted",
        "_tables",
        "_transfers",
        "max_request_tokens",
    )

    def __init__(self, config: SchedulerConfig) -> None:
        width, size = config.decode_tokens, config.prefix_granularity
        self._config = config
        self._most_scheduled_tokens = config.max_scheduled_tokens
        self.max_request_tokens = max_request_tokens(config)
        """Longest prompt plus answer that the pool and the model have room for."""
        slots = [size // group.block_tokens for group in config.paged_groups]
        slots += [1] * len(config.state_groups)
        self._index = PrefixIndex(size, slots)
        self._pool = BlockPool(config.groups, config.num_pages, self._given_up, self._index.depth)
        self._index.watch(self._pool)
        self._transfers = Transfers(self._pool)
        self._host = HostTier(config, self._pool, self._index, self._transfers)
        ahead = 4 * width * (1 + config.overlap_depth)
        self._rows = Rows(config.max_rows, len(config.paged_groups), size, ahead)
        self._tables = BlockTables(
            config.paged_groups,
            size,
            self.max_request_tokens + width * (1 + config.overlap_depth),
            self._pool,
            self._rows,
            config.unsure_tokens,
            len(config.state_groups),
        )
        self._states = StateSlots(
            config.state_groups,
            len(config.paged_groups),
            self._pool,
            self._rows,
            caching=config.prefix_caching,
        )
        self._requests = RequestTable()
        self._kv_events = KvEvents(self._index) if config.kv_events else None
        self._publication = Publication(
            size,
            self._index,
            self._pool,
            self._tables,
            self._states,
            self._rows,
            self._kv_events,
            self._host.offer if self._host.through else None,
        )
        matcher = Matcher(size, self._index, self._tables, self._host.index)
        self._storage = storage_tier(config, matcher, self._host)
        self._peers = self._make_peers(matcher)
        self._admission = Admission(
            config,
            self._requests,
            self._rows,
            self._pool,
            self._tables,
            self._states,
            matcher,
            self._publication,
            self._host,
            self._storage,
            None if self._peers is None else self._peers.receiving,
        )
        self._decoding = Decoding(
            config,
            self._requests,
            self._rows,
            self._tables,
            self._states,
            self._publication,
            self._end,
        )
        self._retraction = Retraction(
            config,
            self._requests,
            self._rows,
            self._pool,
            self._tables,
            self._states,
            self._publication,
            self._decoding,
            self._index,
            self._host,
            self._transfers,
            self._end,
        )
        self._commits = Commits(config, self._requests, self._rows, self._decoding.roster)
        self._apply: dict[type, Callable[..., None]] = {
            Results: self._commit,
            Finished: self._finish,
            Aborted: self._abort,
            **dict.fromkeys(get_args(PeerEvent), self._transferred),
            Reserved: self._reserve,
        }
        self._round = 0
        self._submitted = 0
        self._forwards_allowed = True

    def _make_peers(self, matcher: Matcher) -> Peers | None:
        config, requests, rows = self._config, self._requests, self._rows
        if config.role is Role.PLAIN:
            return None
        views = RowViews(self._pool, self._tables, self._states, rows)
        sending: Sending | None = None
        receiving: Receiving | None = None
        if config.role is Role.PREFILL:
            sending = Sending(requests, rows, views)
        else:
            receiving = Receiving(
                requests,
                rows,
                self._pool,
                self._tables,
                self._states,
                matcher if config.prefix_caching else None,
                views,
                replayed=config.prefix_replay_tokens,
            )
        return Peers(config.role, requests, sending, receiving, self._bootstrapped, self._end)

    # -- requests -----------------------------------------------------------------

    def submit(self, specs: Sequence[RequestSpec]) -> str | None:
        """Line up requests. Returns why they are refused, and then none is lined up."""
        reason = refusal(specs, self._requests, self._config, self.max_request_tokens)
        if reason is None:
            reason = self.crowded(len(specs), sum(len(spec.tokens) for spec in specs))
        if reason is not None:
            return reason
        config = self._config
        granularity = config.prefix_granularity if config.prefix_caching else 0
        state = State.SUBMITTED if config.role is Role.PLAIN else State.BOOTSTRAPPING
        for spec in specs:
            self._submitted += 1
            request = Request(spec, self._submitted, granularity, state)
            self._requests.add(request)
            self._admission.add(request)
            if self._storage is not None and state is State.SUBMITTED:
                self._storage.prefetches.add(request)
        return None

    def crowded(self, requests: int, tokens: int) -> str | None:
        """Say why the queue's limits keep out so many more requests, with `tokens` prompt tokens.

        None, and they may wait.
        """
        rows = self._rows.free
        return crowded(requests, tokens, self._admission.line, rows, self._config)

    @property
    def adjustable(self) -> Adjustments:
        """The settings that may change while it runs, as they are."""
        return self._config.adjustable

    def adjust(self, changes: Adjustments) -> str | None:
        """Change settings from the next plan on; returns why that cannot be, and then none is."""
        tokens = changes.chunked_prefill_size
        if tokens is not UNSET and tokens > self._most_scheduled_tokens:
            return (
                f"chunked_prefill_size {tokens} is above {self._most_scheduled_tokens}, with which "
                "the rank started"
            )
        self._config = self._config.adjusted(changes)
        return None

    # -- feedback -----------------------------------------------------------------

    def advance_head(self, events: Sequence[HeadEvent]) -> None:
        """Apply what is known before planning."""
        for event in events:
            match event:
                case Tick():
                    self._forwards_allowed = event.allow_forward
                    if self._storage is not None:
                        self._storage.tick(event)
                case CacheAck():
                    self._transfers.acknowledge(event)
                case StorageDone():
                    if self._storage is not None:
                        self._storage.done(event)
                case StorageDetached():
                    if self._storage is not None:
                        self._storage.prefetches.detach(event.rid)
                case _:
                    assert_never(event)

    def advance(self, events: Sequence[Event]) -> None:
        """Apply what happened since the last plan, in order.

        Raises IllegalTransitionError when an event meets a request in a state that
        cannot take it; that event changes nothing.
        """
        for event in events:
            self._apply[type(event)](event)

    def _commit(self, results: Results) -> None:
        for request in self._commits.apply(results):
            self._end(request, Move.DRAINED)
        if self._peers is not None:
            self._peers.commit(results)

    def _finish(self, event: Finished) -> None:
        request = self._requests.get(event.rid)
        if request is None or request.state in _OVER:
            return
        owing = bool(request.row) and bool(self._rows.outstanding[request.row])
        self._end(request, Move.FINISH_LATER if owing else Move.FINISH)

    def _abort(self, event: Aborted) -> None:
        request = self._requests.get(event.rid)
        if request is not None and request.state not in (State.FINISHED, State.RETIRING):
            self._stop(request)

    def _stop(self, request: Request) -> None:
        """End a request now; blocks that a peer may touch stay until it does not."""
        touched = self._peers is not None and self._peers.touch(request)
        self._end(request, Move.ABORT_LATER if touched else Move.ABORT)

    def _transferred(self, event: PeerEvent) -> None:
        if self._peers is None:
            raise IllegalTransitionError(f"{event}: a plain engine has no peers")
        arrived = self._peers.apply(event)
        if arrived is not None:
            self._decoding.add(arrived)

    def _bootstrapped(self, request: Request) -> None:
        self._admission.bring_back(request)
        if self._storage is not None:
            self._storage.prefetches.add(request)

    def _reserve(self, event: Reserved) -> None:
        request = self._requests.get(event.rid)
        if request is not None:
            self._requests.move(request, Move.RESERVE)
            self._decoding.reserve(request, event.tokens)

    def _end(self, request: Request, move: Move) -> None:
        """End a request; what it holds is released unless results are outstanding."""
        settled = request.state in (State.PREFILLED, State.DECODING, State.HANDING_OVER)
        self._requests.move(request, move)
        finished = move in (Move.FINISH, Move.FINISH_LATER, Move.SUCCEED)
        if finished and settled and self._config.prefix_caching:
            ended = self._publication.publish_end(request)
            if self._host.through:
                self._host.offer([*self._publication.row_digests(request), *ended])
        self._retraction.leave(request)
        self._decoding.leave(request)
        self._admission.leave(request)
        if self._storage is not None:
            self._storage.prefetches.leave(request)
        if self._peers is not None:
            self._peers.leave(request)
        if request.state is State.FINISHED and request.row:
            self._tables.close(request.row)
            self._states.close(request.row)
            self._rows.give_back(request.row)
            request.row = 0

    # -- planning -----------------------------------------------------------------

    def plan(self) -> Plan:
        """Decide the next round."""
        self._round += 1
        self._requests.forget_ended()
        draft = Draft(self._round)
        if self._host.failed:
            self._distrust(draft)
        self._admission.settle(draft)
        if self._storage is not None:
            self._ask_storage(self._storage, draft)
        if self._host.waiting:
            self._host.store(draft)
        if not self._forwards_allowed:
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
        first_tokens: IntArray | None = None
        if self._peers is not None and decodes is not None:
            first_tokens = self._peers.first_tokens(decodes.rows)
        return draft.done(batch_of(chunks, decodes, self._rows, first_tokens))

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
        budget = self._config.max_scheduled_tokens
        decodes: Decodes | None = None
        if self._config.role is Role.DECODE:
            # Prompts cost the forward nothing; whoever decodes has the first choice of blocks.
            if self._decoding.size:
                decodes = self._decoding.plan(draft, budget)
            return self._admission.plan(draft, budget), decodes
        if self._config.mixed_batch:
            if self._decoding.size:
                decodes = self._decoding.plan(draft, budget)
            if decodes is not None:
                budget -= len(decodes.rows) * self._config.decode_tokens
                if self._config.mixed_prefill_tokens is not None:
                    budget = min(budget, self._config.mixed_prefill_tokens)
            return self._admission.plan(draft, budget), decodes
        chunks = self._admission.plan(draft, budget)
        if not chunks and self._decoding.size:
            decodes = self._decoding.plan(draft, budget)
        return chunks, decodes

    def _given_up(self, group: int, blocks: IndexArray) -> None:
        """Let go of what is cached in `blocks`, which the pool gives to somebody else."""
        if self._host.back:
            self._host.given_up(group, blocks)
        self._index.forget(group, blocks)

    def _distrust(self, draft: Draft) -> None:
        """End whoever read pages that were not loaded, and forget all that may build on them.

        What was computed since cannot be told from what was sound before, so that every
        cached prefix goes, in both tiers.
        """
        failed, readers = self._host.take_failed()
        for request in self._requests.values():
            read = request.sequence in readers or not failed.isdisjoint(request.digests)
            if read and request.state not in _BLANK:
                detail = "pages of its prompt could not be copied back from host memory"
                draft.abort(request.rid, AbortReason.LOAD_FAILED, detail)
                self._stop(request)
        self._pool.disown()
        self._host.disown()
        if self._storage is not None:
            self._storage.distrust()

    # -- what others may know -----------------------------------------------------

    def sizes(self) -> Sizes:
        """Return how many requests are in which state."""
        counts = self._requests.counts
        return Sizes(
            waiting=counts[State.SUBMITTED]
            + counts[State.PREFETCHING]
            + counts[State.RETRACTED]
            + counts[State.RESTORING],
            retracted=counts[State.RETRACTED] + counts[State.RESTORING],
            prefilling=counts[State.PREFILLING]
            + counts[State.PREFILLED]
            + counts[State.AWAITING_RESULT],
            decoding=counts[State.DECODING],
            finishing=counts[State.FINISHING],
            bootstrapping=counts[State.BOOTSTRAPPING],
            transferring=counts[State.RECEIVING]
            + counts[State.HANDING_OVER]
            + counts[State.RETIRING],
        )

    def knows(self, rid: str) -> bool:
        """Whether `rid` is taken; a request that ended is, until the next plan."""
        return rid in self._requests

    def cached_tokens(self, rid: str) -> int:
        """Return the prompt tokens that the request's admission found cached; 0 if unknown."""
        request = self._requests.get(rid)
        return 0 if request is None else request.cached_tokens

    def token_size(self, rid: str) -> int:
        """Return the request's tokens, prompt and answer; -1 if unknown."""
        request = self._requests.get(rid)
        if request is None:
            return -1
        known = int(self._rows.known[request.row]) if request.row else 0
        return max(known, self._retraction.known_tokens(rid), request.prompt_tokens)

    @property
    def empty_pages(self) -> int:
        """Parents of the pool that hold nothing."""
        return self._pool.empty

    def free_pages(self) -> int:
        """Return the parents that nobody holds: empty, or cached and nothing else."""
        return self._config.num_pages - 1 - self.active_pages()

    def active_pages(self) -> int:
        """Return the parents that live requests hold."""
        return self._pool.active_parents()

    def census(self) -> Census:
        """Count the pages of every pool; it looks at every block."""
        return Census(self._pool.census(), self._host.pool.census(), self._retraction.census())

    def can_clear(self) -> bool:
        """Whether nothing cached is held, nothing is copied and nobody is suspended.

        Nor may storage owe an answer; what is quarantined never becomes findable.
        """
        return self.can_clear_l1() and (self._storage is None or self._storage.clearable)

    def can_clear_l1(self) -> bool:
        """Whether nothing cached on the device is held, nothing is copied, nobody suspended."""
        return not (self._pool.cached_and_held() or len(self._transfers) or len(self._retraction))

    def clear(self) -> bool:
        """Forget every cached prefix; False, and nothing happened, while one is held."""
        if not self.can_clear():
            return False
        self._pool.clear()
        self._host.disown()
        if self._storage is not None:
            self._storage.forget()
        return True

    def clear_l1(self) -> bool:
        """Forget the device's cached prefixes alone; False, and nothing, while one is held."""
        if not self.can_clear_l1():
            return False
        self._pool.clear()
        self._host.discard()
        return True

    def drain_kv_events(self) -> list[KvEvent]:
        """Return what became or ceased to be findable since the last drain, net."""
        return [] if self._kv_events is None else self._kv_events.drain()

    def explain(self, rid: str) -> str:
        """Say in one line where the request stands and what it waits for."""
        return explain(rid, self._requests, self._rows, self._pool, self._admission, self._storage)

    @property
    def storage_pending(self) -> bool:
        """Whether a storage operation is to be planned or answered."""
        return self._storage is not None and self._storage.pending

    def storage_stats(self) -> StorageStats:
        """Return how transactions with storage stand."""
        return StorageStats() if self._storage is None else self._storage.stats()

    def check(self) -> None:
        """Raise InvariantError unless every page, row and request is accounted for."""
        self._pool.check()
        self._index.check(self._pool)
        self._rows.check()
        self._tables.check([*self._transfers.held(), *self._states.held()])
        self._states.check()
        self._retraction.check()
        others = self._retraction.host_blocks()
        if self._storage is not None:
            self._storage.check(self._requests.counts[State.PREFETCHING])
            others += self._storage.held()
        self._host.check(others)
        self._admission.check()
        self._decoding.check()
        if self._peers is not None:
            self._peers.check()
        self._requests.check()
