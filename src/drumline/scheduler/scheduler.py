"""The scheduler: submit requests, advance by events, plan rounds.

It knows what each part must learn when a request comes, when something happened to it, and
when it ends. The parts know nothing of each other's callers.
"""

from collections.abc import Callable, Sequence
from typing import assert_never, get_args

from msgspec import UNSET

from drumline.contract.cache import CacheAck
from drumline.contract.census import Census
from drumline.contract.internal_state import Adjustments
from drumline.contract.kv_events import KvEvent
from drumline.contract.plan import Plan
from drumline.contract.storage import StorageDone
from drumline.core.config import Role
from drumline.scheduler.config import SchedulerConfig
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
from drumline.scheduler.lifecycle import OVER, Move, State
from drumline.scheduler.parts import Parts
from drumline.scheduler.peers import PeerEvent
from drumline.scheduler.planning import Planning
from drumline.scheduler.refusal import crowded, refusal
from drumline.scheduler.requests import Request


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
        "_host",
        "_kv_events",
        "_most_scheduled_tokens",
        "_parts",
        "_peers",
        "_planning",
        "_pool",
        "_publication",
        "_requests",
        "_retraction",
        "_rows",
        "_storage",
        "_submitted",
        "_transfers",
        "max_request_tokens",
    )

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._most_scheduled_tokens = config.max_scheduled_tokens
        self._parts = parts = Parts(config, self._end, self._bootstrapped)
        self.max_request_tokens = parts.max_request_tokens
        """Longest prompt plus answer that the pool and the model have room for."""
        self._admission = parts.admission
        self._commits = parts.commits
        self._decoding = parts.decoding
        self._host = parts.host
        self._kv_events = parts.kv_events
        self._peers = parts.peers
        self._pool = parts.pool
        self._publication = parts.publication
        self._requests = parts.requests
        self._retraction = parts.retraction
        self._rows = parts.rows
        self._storage = parts.storage
        self._transfers = parts.transfers
        self._planning = Planning(config, parts, self._stop)
        self._apply: dict[type, Callable[..., None]] = {
            Results: self._commit,
            Finished: self._finish,
            Aborted: self._abort,
            **dict.fromkeys(get_args(PeerEvent), self._transferred),
            Reserved: self._reserve,
        }
        self._submitted = 0

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
        self._config = self._planning.config = self._config.adjusted(changes)
        return None

    # -- feedback -----------------------------------------------------------------

    def advance_head(self, events: Sequence[HeadEvent]) -> None:
        """Apply what is known before planning."""
        for event in events:
            match event:
                case Tick():
                    self._planning.forwards_allowed = event.allow_forward
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
        if request is None or request.state in OVER:
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
            self._parts.tables.close(request.row)
            self._parts.states.close(request.row)
            self._rows.give_back(request.row)
            request.row = 0

    def plan(self) -> Plan:
        """Decide the next round."""
        return self._planning.plan()

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
        return Census(self._pool.census(), self._host.pool.census(), self._parts.snapshots.census())

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
        self._parts.check()
