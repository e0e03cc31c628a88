"""A data plane of arithmetic, with pages: it makes the control plane's mistakes visible.

It keeps its own block tables, which only a plan's patches change, and a cache entry
for every slot of every block. A batch's tokens follow from the entries that the
tables lead to, so a wrong table, a page that was given away too early or a copy in
the wrong order ends in tokens that no request should have got. What a real plane
would read on its forward thread is read here as late as the simulation wishes; copies
that order nothing are carried out only when they are acknowledged, so that a block given
away too early carries off what became of it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import assert_never

import numpy as np
from msgspec import Struct

from drumline.contract.cache import CacheAck, CacheOp
from drumline.contract.grammar import Attachment, Matcher
from drumline.contract.plan import Batch, Bound, Plan
from drumline.contract.ports import Dispatch, DpRound
from drumline.contract.profile import Recording, Span, Stage
from drumline.contract.regions import Region
from drumline.contract.request import Admission
from drumline.contract.result import ForwardResult
from drumline.contract.specs import AttentionKind, DeviceSpecs
from drumline.contract.weights import (
    DiskWeights,
    NewWeights,
    SentWeights,
    TensorWeights,
    WeightGroup,
    WeightRows,
)
from drumline.core.errors import ConfigError, InvariantError
from drumline.replay.arithmetic import token_of
from drumline.replay.pages import Pages
from drumline.replay.tiers import GARBAGE, PagedTiers
from drumline.replay.told import logprobs, pooled, prompt_logprobs

_ELSEWHERE = -1
"""Stands for the token that another stage sampled last."""


class Profiled(Struct, eq=False):
    """One recording: what was asked for, and the rounds whose forwards it has."""

    recording: Recording
    stage: Stage | None
    rounds: list[int] = []
    spans: tuple[Span, ...] = ()
    over: bool = False


def named(source: NewWeights) -> str:
    """Return what the fake plane calls weights: a path, or the tensors and their names."""
    match source:
        case DiskWeights(path=path):
            return path
        case TensorWeights(data=data):
            return data.decode()
        case SentWeights(tensors=tensors):
            return ", ".join(each.name for each in tensors)
    assert_never(source)


class PagedPlane:
    """The fake data plane.

    `lag` operations stay queued behind the caller before they run, as on a forward
    thread that is behind; `complete` runs all that stand before its forward.
    `faulty` names requests whose logits are not finite. A cache operation is acknowledged
    at the `delay(op)`-th poll after it ran (0: at the next one), and one that is `failing`
    moves nothing.
    Of a pipeline every stage feeds what plans name, and the last alone `samples`. What each saw
    of a forward's rows is in `seen`, which must be the same on all of them.
    Memory that is released holds garbage, and a forward in it is an error; `unreleasable`
    is why none can be.
    """

    def __init__(
        self,
        specs: DeviceSpecs,
        *,
        lag: Callable[[], int] = lambda: 0,
        faulty: frozenset[str] = frozenset(),
        delay: Callable[[CacheOp], int] = lambda _op: 0,
        failing: Callable[[CacheOp], bool] = lambda _op: False,
        stages: int = 1,
        samples: bool = True,
    ) -> None:
        self._stages = stages
        self._samples = samples
        self.seen: list[tuple[int, ...]] = []
        """Of each forward of a pipeline, what its rows that end saw."""
        for group in specs.groups:
            if group.kind is AttentionKind.STATE:
                raise ConfigError(
                    f"groups[{group.group_id}]", "the simulated data plane keeps no state groups"
                )
        self._vocab_size = specs.model.vocab_size
        self._lag = lag
        self._faulty = faulty
        self._owners: dict[int, Bound] = {}
        self._admitted: dict[str, Admission] = {}
        self._last: dict[str, int] = {}
        self._matchers: dict[str, Matcher] = {}
        self._tiers = PagedTiers(specs, self._last, delay, failing)
        self._slots = self._tiers.device
        self._pages = Pages(specs, self._tiers)
        self._queue: deque[Callable[[], None]] = deque()
        self._results: dict[int, ForwardResult] = {}
        self._forwards: list[DpRound | None] = []
        self._tickets = 0
        self._completed = 0
        self.gone: set[Region] = set()
        """The regions that are released."""
        self.unreleasable: str | None = None
        self._discards = specs.discards_weights
        self.weights: str | None = ""
        """The name of those that serve, as `named` gives it; the tokens do not depend on them."""
        self.groups: dict[str, WeightGroup] = {}
        """The trainers' groups that this rank is in."""
        self.unfit: dict[str, str] = {}
        """Why groups cannot be opened, by name."""
        self.unreachable: dict[str, str] = {}
        """Why groups that can be opened cannot be joined."""
        self.shown: dict[str, WeightRows | None] = {}
        """What is told of weights."""
        self.unreadable: dict[str, str] = {}
        """Why weights cannot be opened, by name."""
        self.absent: str | None = None
        """A weight that was not loaded since all were dropped."""
        self.partial: set[str] = set()
        """The names of what is not all weights."""
        self.broken: dict[str, str] = {}
        """Why weights that can be opened cannot be loaded."""
        self.unrecordable: str | None = None
        """Why nothing can be recorded."""
        self.unwritable: str | None = None
        """Why what was recorded cannot be written."""
        self.profiled: list[Profiled] = []
        """What was recorded, the last perhaps still."""
        self._recording: Recording | None = None
        self._opened: str | None = None
        self._loaded: str | None = None
        self._source: NewWeights | None = None
        self._joining: WeightGroup | None = None

    def take_forwards(self) -> list[DpRound | None]:
        """Return what was agreed of each forward, real or idle, since the last call."""
        taken, self._forwards = self._forwards, []
        return taken

    @property
    def known(self) -> int:
        """Requests admitted and not released, once everything queued has run."""
        self._run(0)
        return len(self._admitted)

    def admit(self, requests: Sequence[Admission]) -> None:
        """Queue: learn requests."""
        copies = list(requests)
        self._push(lambda: self._learn(copies))

    def attach_grammars(self, attachments: Sequence[Attachment]) -> None:
        """Queue: hold requests to grammars."""
        copies = list(attachments)
        self._push(lambda: self._attach(copies))

    def execute(self, plan: Plan, dispatch: Dispatch) -> int | None:
        """Queue: carry out a plan; returns the ticket of its forward."""
        if plan.batch is None:
            self._push(lambda: self._prepare(plan))
            if dispatch.dp is not None and dispatch.dp.idle:
                self._check_memory()
                self._forwards.append(dispatch.dp)
            return None
        self._check_memory()
        self._forwards.append(dispatch.dp)
        if self.profiled and not self.profiled[-1].over:
            self.profiled[-1].rounds.append(plan.round)
        self._tickets += 1
        ticket = self._tickets
        self._push(lambda: self._forward(plan, dispatch, ticket))
        return ticket

    def idle_forward(self, dp: DpRound) -> None:
        """Run an idle forward and all that is queued before it."""
        self._run(0)
        self._check_memory()
        self._forwards.append(dp)

    def complete(self, ticket: int) -> ForwardResult:
        """Return a forward's results, running what is queued up to it."""
        if ticket != self._completed + 1:
            raise InvariantError(f"forward {ticket} completed after forward {self._completed}")
        self._completed = ticket
        while ticket not in self._results:
            self._queue.popleft()()
        return self._results.pop(ticket)

    def poll_cache_acks(self) -> list[CacheAck]:
        """Return the ends of cache operations that landed since the last call."""
        if self._queue:
            # As time passes, a thread that is behind catches up.
            self._queue.popleft()()
        return self._tiers.poll()

    def release(self, rids: Sequence[str]) -> None:
        """Queue: forget requests."""
        copies = list(rids)
        self._push(lambda: self._forget(copies))

    def release_memory(self, regions: Sequence[Region]) -> str | None:
        """Give regions back, behind all that is queued."""
        self._run(0)
        if self.unreleasable is not None:
            return self.unreleasable
        if self._results or not self.gone.isdisjoint(regions):
            raise InvariantError(f"{regions} are released beside {self.gone} and {self._results}")
        self.gone.update(regions)
        if Region.KV_CACHE in regions:
            for slots in self._slots:
                slots[:] = GARBAGE
        return None

    def drop_weights(self) -> None:
        """Give the weights back and forget what they were."""
        self._run(0)
        if self.unreleasable is not None or Region.WEIGHTS in self.gone:
            raise InvariantError(f"weights are dropped beside {self.gone}: {self.unreleasable}")
        self.gone.add(Region.WEIGHTS)
        self.weights = None
        self.absent = "every weight"

    def absent_weight(self) -> str | None:
        """Return what is still to come, as far as a test says so."""
        return self.absent

    def restore_memory(self, regions: Sequence[Region]) -> None:
        """Take regions back."""
        self._run(0)
        if not self.gone.issuperset(regions):
            raise InvariantError(f"{regions} are restored, of which {self.gone} are released")
        self.gone.difference_update(regions)
        if Region.KV_CACHE in regions:
            for slots in self._slots:
                slots[:] = 0

    def open_profile(self, recording: Recording) -> str | None:
        """Learn what is to be recorded."""
        self._run(0)
        self._recording = recording
        return self.unrecordable

    def start_profile(self, stage: Stage | None) -> None:
        """Queue: record the forwards that follow."""
        if self._recording is None or (self.profiled and not self.profiled[-1].over):
            raise InvariantError(f"a recording of {stage} begins beside {self.profiled}")
        self.profiled.append(Profiled(self._recording, stage))

    def stop_profile(self, spans: tuple[Span, ...]) -> str | None:
        """End the recording, behind all that is queued."""
        self._run(0)
        if not self.profiled or self.profiled[-1].over:
            raise InvariantError("a recording ends that did not begin")
        self.profiled[-1].over = True
        self.profiled[-1].spans = spans
        return self.unwritable

    def open_weights(self, source: NewWeights) -> str | None:
        """Open other weights, behind all that is queued."""
        self._run(0)
        if Region.WEIGHTS in self.gone:
            return "the weights are released"
        if isinstance(source, SentWeights) and source.group not in self.groups:
            return f"there is no group {source.group}"
        self._opened = named(source)
        self._source = source
        return self.unreadable.get(self._opened)

    def load_weights(self) -> str | None:
        """Load them."""
        if self._opened is None or Region.WEIGHTS in self.gone:
            raise InvariantError(f"{self._opened} is loaded while {self.gone} are released")
        self._loaded, self._opened = self._opened, None
        if self._discards:
            self.weights = None
        return self.broken.get(self._loaded)

    def settle_weights(self, taken: bool) -> None:
        """Take what was loaded."""
        if taken:
            if self._loaded is None or self._loaded in self.broken:
                raise InvariantError(f"{self._loaded} is taken")
            if self._loaded not in self.partial:
                self.absent = None
            self.weights = self._loaded
        elif self._loaded is not None and isinstance(self._source, SentWeights):
            self.groups.pop(self._source.group, None)
        self._opened = self._loaded = None

    def open_weight_group(self, group: WeightGroup) -> str | None:
        """Learn which group is to be joined."""
        self._run(0)
        if group.name in self.groups:
            return f"there is a group {group.name} already"
        self._joining = group
        return self.unfit.get(group.name)

    def join_weight_group(self) -> str | None:
        """Become a member."""
        group, self._joining = self._joining, None
        if group is None:
            raise InvariantError("a group is joined that was not opened")
        if group.name in self.unreachable:
            return self.unreachable[group.name]
        self.groups[group.name] = group
        return None

    def leave_weight_group(self, name: str) -> None:
        """Be no member any more."""
        self.groups.pop(name, None)

    def read_weight(self, name: str, rows: int) -> WeightRows | str | None:
        """Return a part of a weight that a test made up."""
        self._run(0)
        return self.shown.get(name, f"no weight here is called {name}")

    def _push(self, operation: Callable[[], None]) -> None:
        self._queue.append(operation)
        self._run(self._lag())

    def _check_memory(self) -> None:
        if self.weights is None or self.absent is not None:
            raise InvariantError("a forward without weights")
        if self.gone:
            raise InvariantError(f"a forward without its memory: {sorted(self.gone)} are released")

    def _run(self, lag: int) -> None:
        while len(self._queue) > lag:
            self._queue.popleft()()

    # What the forward thread does

    def _learn(self, requests: Sequence[Admission]) -> None:
        for request in requests:
            if request.rid in self._admitted:
                raise InvariantError(f"{request.rid!r} is admitted twice")
            self._admitted[request.rid] = request

    def _attach(self, attachments: Sequence[Attachment]) -> None:
        for attachment in attachments:
            if attachment.rid not in self._admitted:
                raise InvariantError(f"{attachment.rid!r} gets a grammar but is not admitted")
            self._matchers[attachment.rid] = attachment.grammar.matcher()

    def _held_to_grammar(self, rid: str, token: int) -> int:
        """Return the token that a request's grammar makes of the one that was drawn."""
        matcher = self._matchers.get(rid)
        if matcher is None or matcher.terminated:
            return token
        words = np.zeros((1, (self._vocab_size + 31) // 32), np.int32)
        matcher.fill(words, 0)
        bits = np.unpackbits(words.view(np.uint8), count=self._vocab_size, bitorder="little")
        allowed = np.flatnonzero(bits)
        token = int(allowed[token % len(allowed)])
        if not matcher.accept(token):
            raise InvariantError(f"{rid!r}: its grammar allowed {token} and does not take it")
        return token

    def _forget(self, rids: Sequence[str]) -> None:
        for rid in rids:
            if self._admitted.pop(rid, None) is None:
                raise InvariantError(f"{rid!r} is released but not admitted")
            self._last.pop(rid, None)
            self._matchers.pop(rid, None)

    def _prepare(self, plan: Plan) -> None:
        self._pages.prepare(plan)
        for bound in plan.bound:
            self._owners[bound.row] = bound

    def _forward(self, plan: Plan, dispatch: Dispatch, ticket: int) -> None:
        self._prepare(plan)
        batch = plan.batch
        assert batch is not None
        requests: list[Admission] = []
        tokens: list[int] = []
        seen: list[int] = []
        counts = np.ones(batch.size, np.int32)
        faulty: list[int] = []
        start = 0
        for index in range(batch.size):
            request = self._reader(batch, index)
            requests.append(request)
            length = int(batch.input_lengths[index])
            if index < batch.extends:
                feed = batch.extend_ids[start : start + length].tolist()
                start += length
            else:
                feed = [self._fed_back(batch, index, request)]
            row, before = int(batch.rows[index]), int(batch.prefix_lengths[index])
            self._pages.write(row, before, feed)
            end = before + length
            if index < batch.extends and end < batch.prompt_lengths[index]:
                counts[index] = 0
                continue
            seen.append(self._pages.seen(row, end))
            if not self._samples:
                self._last[request.rid] = _ELSEWHERE
                continue
            token = token_of(seen[-1], request.sampling.seed, self._vocab_size)
            token = self._held_to_grammar(request.rid, token)
            self._last[request.rid] = token
            tokens.append(token)
            if request.rid in self._faulty:
                faulty.append(index)
        if self._stages > 1:
            self.seen.append(tuple(seen))
        if not self._samples:
            nothing = np.zeros(batch.size, np.int32)
            self._results[ticket] = ForwardResult(tokens=nothing[:0], counts=nothing)
            return
        sampled = np.array(tokens, np.int32)
        self._results[ticket] = ForwardResult(
            tokens=sampled,
            counts=counts,
            nan_indices=np.array(faulty, np.int32),
            logprobs=logprobs(dispatch.logprobs, sampled, counts),
            prompt_logprobs=prompt_logprobs(dispatch.logprobs, batch, requests),
            pooled=pooled(dispatch.logprobs, batch, requests),
        )

    def _reader(self, batch: Batch, index: int) -> Admission:
        """Return the request a batch's row serves, which must be the one it was planned for."""
        row, generation = int(batch.rows[index]), int(batch.generations[index])
        owner = self._owners.get(row)
        if owner is None or owner.generation != generation:
            raise InvariantError(f"row {row} of generation {generation} is bound to {owner}")
        request = self._admitted.get(owner.rid)
        if request is None:
            raise InvariantError(f"a forward reads {owner.rid!r}, which is released")
        return request

    def _fed_back(self, batch: Batch, index: int, request: Admission) -> int:
        named = -1 if batch.decode_ids is None else int(batch.decode_ids[index - batch.extends])
        last = self._last[request.rid]
        if self._stages > 1 and last not in (named, _ELSEWHERE):
            raise InvariantError(f"{request.rid!r} is fed {named} where {last} was sampled")
        fed = last if named < 0 else named
        if fed == _ELSEWHERE:
            raise InvariantError(f"{request.rid!r} is fed what this stage does not know")
        return fed
