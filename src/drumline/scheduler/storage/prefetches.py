"""Bringing waiting requests' prompts from storage to host memory, before their admission.

A request is looked at once it was submitted, in order of submission and as far as there
are operations to spare; whoever is admitted before its turn computes what it lacks. While
a request waits for storage it stands aside from the line, until its answer, its deadline
or a page that somebody else made findable brings it back. One transaction a request.

Requests that lack the same page wait for one fetch of it, where prefixes are shared in
flight: for no longer than a fetch may take.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from msgspec import Struct

from drumline.contract.storage import StorageDone, StorageKey
from drumline.core.errors import InvariantError
from drumline.scheduler.config import SchedulerConfig, StorageLimits
from drumline.scheduler.draft import Draft
from drumline.scheduler.host import HostTier, Pages
from drumline.scheduler.index import NOBODY, IndexArray
from drumline.scheduler.lifecycle import State
from drumline.scheduler.match import Match
from drumline.scheduler.matching import Matcher
from drumline.scheduler.requests import Request
from drumline.scheduler.storage.fetch import Fetch, Stage, Turn
from drumline.scheduler.storage.objects import KnownObjects
from drumline.scheduler.storage.operations import Operations


class Turns(Struct):
    """Requests that a plan sends aside from the line, and those it brings back."""

    aside: list[Request]
    back: list[Request]


class _Held(Struct, frozen=True):
    """A request does not ask by itself while page `digest` is fetched for another one."""

    digest: bytes
    until_us: int


class Prefetches:
    """The requests' transactions with storage."""

    __slots__ = (
        "_back",
        "_coming",
        "_fetches",
        "_held",
        "_host",
        "_known",
        "_limits",
        "_matcher",
        "_now_us",
        "_operations",
        "_page",
        "_replayed",
        "_sharing",
        "_slots",
        "_unasked",
        "bypassed",
        "expired",
        "timed_out",
    )

    def __init__(
        self,
        limits: StorageLimits,
        config: SchedulerConfig,
        matcher: Matcher,
        host: HostTier,
        operations: Operations,
        known: KnownObjects,
    ) -> None:
        self._limits = limits
        self._page = config.prefix_granularity
        self._slots = host.index.slots
        self._replayed = config.prefix_replay_tokens
        self._sharing = config.share_in_flight
        self._matcher = matcher
        self._host = host
        self._operations = operations
        self._known = known
        self._unasked: dict[str, Request] = {}
        self._held: dict[str, _Held] = {}
        self._coming: set[bytes] = set()
        """The pages that are being fetched, as of the newest plan, where anybody is held up."""
        self._fetches: dict[str, Fetch] = {}
        self._back: dict[str, Request] = {}
        """Who waits for storage no longer, until the next plan."""
        self._now_us = 0
        self.bypassed = self.expired = self.timed_out = 0

    def add(self, request: Request) -> None:
        """Take a submitted request, whose prompt may be in storage."""
        self._unasked[request.rid] = request

    def leave(self, request: Request) -> None:
        """Forget a request that was admitted or ended."""
        self._pass_over(request.rid)
        fetch = self._fetches.get(request.rid)
        if fetch is not None:
            self._give_up(fetch)

    def _pass_over(self, rid: str) -> None:
        """Have a request's turn to be asked for never come."""
        self._unasked.pop(rid, None)
        self._held.pop(rid, None)

    def detach(self, rid: str) -> None:
        """Have a request wait for storage no longer."""
        self._pass_over(rid)
        fetch = self._fetches.get(rid)
        if fetch is not None:
            self._give_up(fetch)
            self._back[fetch.request.rid] = fetch.request

    @property
    def ready_blocks(self) -> int:
        """Host blocks held for requests that wait for their admission."""
        return sum(len(fetch.held) for fetch in self._fetches.values())

    def count(self, *, ready: bool) -> int:
        """Return how many requests have what was fetched, or else wait for it."""
        return sum((fetch.stage is Stage.READY) is ready for fetch in self._fetches.values())

    # -- planning -----------------------------------------------------------------

    def plan(self, now_us: int, draft: Draft, *, allowed: bool, pressed: bool) -> Turns:
        """End what waited long enough, go on with what was found, and ask for more."""
        self._now_us = now_us
        for fetch in list(self._fetches.values()):
            self._review(fetch, pressed=pressed)
        if allowed:
            for fetch in list(self._fetches.values()):
                if fetch.stage is Stage.FOUND:
                    self._read(fetch, draft)
        back = [one for one in self._back.values() if one.state is State.PREFETCHING]
        self._back.clear()
        aside: list[Request] = []
        if allowed and pressed:
            self.bypassed += len(self._unasked)
            self._unasked.clear()
            self._held.clear()
        elif allowed and self._unasked:
            self._ask_some(aside, draft)
        self._coming = self._fetched() if self._held else set()
        return Turns(aside, back)

    def _review(self, fetch: Fetch, *, pressed: bool) -> None:
        """Give a fetch up that takes too long, that adds pressure or that nobody needs."""
        late = self._now_us >= fetch.deadline_us
        if fetch.stage is Stage.READY:
            if late:
                self.expired += 1
                self._give_up(fetch)
            return
        if late:
            self.timed_out += 1
        elif pressed and fetch.stage in (Stage.ASKING, Stage.FOUND):
            self.bypassed += 1
        elif not self._cached(fetch):
            return
        self._give_up(fetch)
        self._back[fetch.request.rid] = fetch.request

    def _cached(self, fetch: Fetch) -> bool:
        """Whether somebody else made findable all that was asked for."""
        last, request = fetch.last, fetch.request
        if not self._matcher.has(last.digest, last.group, last.part):
            return False
        match = self._matcher.match(request, request.cacheable_tokens(self._replayed))
        return match.pages >= len(fetch.digests)

    def _give_up(self, fetch: Fetch) -> None:
        if fetch.stage in (Stage.ASKING, Stage.FETCHING):
            self._operations.cancel(fetch.op_id)
        self._end(fetch, Turn.GIVEN_UP)

    def _end(self, fetch: Fetch, turn: Turn) -> None:
        fetch.turn(turn)
        del self._fetches[fetch.request.rid]
        if len(fetch.held):
            self._host.let_go_of(fetch.held)
            fetch.held = NOBODY

    # -- asking -------------------------------------------------------------------

    def _ask_some(self, aside: list[Request], draft: Draft) -> None:
        coming = self._fetched()
        for request in list(self._unasked.values()):
            if len(self._operations) >= self._limits.max_operations:
                return
            held = self._held.get(request.rid)
            if held is not None and held.digest in coming and self._now_us < held.until_us:
                continue
            fetch = self._wanted(request)
            if fetch is None:
                self._pass_over(request.rid)
                continue
            first = fetch.keys[0].digest
            if self._sharing and first in coming and held is None:
                until = self._now_us + self._limits.wait_timeout_us
                self._held[request.rid] = _Held(first, until)
                continue
            self._pass_over(request.rid)
            fetch.op_id = self._operations.query(fetch.keys, partial(self._answered, fetch), draft)
            self._fetches[request.rid] = fetch
            coming.update(key.digest for key in fetch.keys)
            aside.append(request)

    def _fetched(self) -> set[bytes]:
        """Return the pages that are asked for or being read."""
        return {
            key.digest
            for fetch in self._fetches.values()
            if fetch.stage is not Stage.READY
            for key in fetch.keys
        }

    def holds_up(self, request: Request, digest: bytes) -> bool:
        """Whether the request waits for another one's fetch of page `digest`, and still may."""
        held = self._held.get(request.rid)
        if held is None or held.digest != digest or self._now_us >= held.until_us:
            return False
        return digest in self._coming

    def _wanted(self, request: Request) -> Fetch | None:
        """Return what to ask for of a prompt; None where too little of it is missing."""
        limits, page = self._limits, self._page
        cap = request.cacheable_tokens(self._replayed)
        digests = request.digests[: cap // page]
        match = self._matcher.match(request, cap)
        first, last = match.pages, len(digests)
        if last * page - match.tokens < limits.min_prefetch_tokens:
            return None
        last = min(last, (match.tokens + limits.max_prefetch_tokens) // page)
        local = self._matcher.presence(digests)
        keys: list[StorageKey] = []
        for at in range(first, last):
            missing = self._missing(at, digests[at], local)
            if len(keys) + len(missing) > limits.max_keys_per_operation:
                last = at
                break
            keys += missing
        if not keys:
            return None
        cells = [np.zeros(last * slots, np.intp) for slots in self._slots]
        deadline = self._now_us + limits.wait_timeout_us
        return Fetch(request, deadline, 0, digests[:last], tuple(keys), keys[-1], cells)

    def _missing(self, at: int, digest: bytes, local: Sequence[IndexArray]) -> list[StorageKey]:
        keys = []
        for group, slots in enumerate(self._slots):
            for part in range(slots):
                key = StorageKey(group, digest, part)
                if not local[group][at * slots + part] and not self._known.is_bad(key):
                    keys.append(key)
        return keys

    def _answered(self, fetch: Fetch, _blocks: IndexArray, done: StorageDone) -> None:
        self._note(fetch.keys, done)
        at = {digest: page for page, digest in enumerate(fetch.digests)}
        for key, success in zip(fetch.keys, done.success, strict=True):
            cell = at[key.digest] * self._slots[key.group] + key.part
            fetch.stored[key.group][cell] = success
        if any(done.success):
            fetch.turn(Turn.HITS)
        else:
            self._end(fetch, Turn.MISSES)
            self._back[fetch.request.rid] = fetch.request

    def _note(self, keys: Sequence[StorageKey], done: StorageDone) -> None:
        for key, success in zip(keys, done.success, strict=True):
            if success:
                self._known.learn(key, stored=True)
        for key, failed in zip(keys, done.failed, strict=False):
            if failed:
                self._known.learn(key, stored=False)

    # -- reading ------------------------------------------------------------------

    def _read(self, fetch: Fetch, draft: Draft) -> None:
        """Plan reading what was found, as deep as it helps and host memory has room."""
        if len(self._operations) >= self._limits.max_operations:
            return
        local = self._matcher.presence(fetch.digests)
        spare = self._limits.max_host_blocks - self._operations.held - self.ready_blocks
        match = self._deepest_of(fetch, local, len(fetch.digests))
        while True:
            wanted = [
                (mine > 0) & (here[: len(mine)] == 0)
                for mine, here in zip(match.blocks, local, strict=True)
            ]
            needs = [int(np.count_nonzero(part)) for part in wanted]
            if not any(needs):
                self._end(fetch, Turn.MISSES)
                self._back[fetch.request.rid] = fetch.request
                return
            # A page less spares no more than a page's blocks.
            excess = -(-(sum(needs) - spare) // sum(self._slots))
            if excess <= 0 and self._host.pool.make_room(needs):
                break
            pages = match.pages - excess if excess > 0 else match.pages // 2
            match = self._deepest_of(fetch, local, max(pages, 0))
        keys: list[StorageKey] = []
        blocks = []
        for group, (slots, part) in enumerate(zip(self._slots, wanted, strict=True)):
            blocks.append(self._host.pool.take(group, needs[group]))
            for cell in np.flatnonzero(part).tolist():
                page, slot = divmod(cell, slots)
                keys.append(StorageKey(group, fetch.digests[page], slot))
        fetch.keys = tuple(keys)
        fetch.op_id = self._operations.get(
            fetch.keys,
            np.concatenate(blocks),
            partial(self._was_read, fetch),
            draft,
        )
        fetch.turn(Turn.STARTED)

    def _deepest_of(self, fetch: Fetch, local: Sequence[IndexArray], pages: int) -> Match:
        either = [
            np.maximum(here, there)[: pages * slots]
            for here, there, slots in zip(local, fetch.stored, self._slots, strict=True)
        ]
        return self._matcher.deepest(fetch.request, either)

    def _was_read(self, fetch: Fetch, blocks: IndexArray, done: StorageDone) -> None:
        self._note(fetch.keys, done)
        if not any(done.success):
            self._end(fetch, Turn.MISSES)
        else:
            fetch.held = self._publish(fetch, blocks, done)
            fetch.deadline_us = self._now_us + self._limits.ready_timeout_us
            fetch.turn(Turn.READ)
        self._back[fetch.request.rid] = fetch.request

    def _publish(self, fetch: Fetch, blocks: IndexArray, done: StorageDone) -> IndexArray:
        """Make what was read findable in host memory; returns the blocks, held once more."""
        at = {digest: page for page, digest in enumerate(fetch.digests)}
        parts = [np.zeros((len(fetch.digests), slots), np.intp) for slots in self._slots]
        for key, block, success in zip(fetch.keys, blocks.tolist(), done.success, strict=True):
            if success:
                parts[key.group][at[key.digest], key.part] = block
        ends = np.arange(1, len(fetch.digests) + 1) * self._page
        return self._host.adopt(Pages(fetch.digests, ends, parts))

    def drop_ready(self) -> None:
        """Let go of what was fetched and nobody was admitted with yet."""
        for fetch in list(self._fetches.values()):
            if fetch.stage is Stage.READY:
                self._give_up(fetch)

    # -- what others may know ------------------------------------------------------

    def explain(self, rid: str) -> str:
        """Say what the request waits for; empty where it does not."""
        fetch = self._fetches.get(rid)
        if fetch is None or fetch.stage is Stage.READY:
            return ""
        doing = {
            Stage.ASKING: f"whether it has {len(fetch.keys)} blocks of its prompt",
            Stage.FOUND: "some blocks of its prompt, not asked for yet",
            Stage.FETCHING: f"{len(fetch.keys)} blocks of its prompt",
        }[fetch.stage]
        return (
            f"for storage, {doing} (operation {fetch.op_id}), "
            f"until {fetch.deadline_us} us; it is {self._now_us} us"
        )

    def held(self) -> list[IndexArray]:
        """Return the host blocks held for admissions, a request an entry."""
        return [fetch.held for fetch in self._fetches.values()]

    def check(self, prefetching: int) -> None:
        """Raise InvariantError unless the `prefetching` requests have a fetch or come back."""
        aside = {rid for rid, fetch in self._fetches.items() if fetch.stage is not Stage.READY}
        aside.update(rid for rid, one in self._back.items() if one.state is State.PREFETCHING)
        if len(aside) != prefetching:
            raise InvariantError(f"{prefetching} requests wait for storage, {len(aside)} do")
        for rid, fetch in self._fetches.items():
            state = fetch.request.state
            waiting = fetch.stage is not Stage.READY
            back = rid in self._back
            if fetch.stage is Stage.OVER or (waiting or back) != (state is State.PREFETCHING):
                raise InvariantError(f"{rid} is {state.name}, its fetch {fetch.stage.name}")
            if rid in self._unasked or rid in self._held:
                raise InvariantError(f"{rid} has a fetch and is to get one")
        if not self._held.keys() <= self._unasked.keys():
            raise InvariantError("a request is held up that does not wait for its turn")
        for request in self._unasked.values():
            if request.state is not State.SUBMITTED:
                raise InvariantError(f"{request!r} is to ask storage")
