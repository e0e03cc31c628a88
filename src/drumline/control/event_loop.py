"""The event loop of one rank: what happens in a round, and in which order.

`EventLoop.round` is the schedule; each step belongs to a module that owns its state,
is called once and returns what must happen. The scheduler advances here and nowhere
else. Nothing in this package can reach a device: the only door is `DataPlane`, whose
operations are queued, and only `complete` waits.

Every rank of a replica runs the same rounds on the same inputs. A group of one takes
the same path.
"""

import logging
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, assert_never

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from drumline.contract.arrays import NO_INTS
from drumline.contract.cache import Snapshot
from drumline.contract.grammar import Attachment
from drumline.contract.internal_state import InternalState
from drumline.contract.messages import AbortAsked, CallAsked, Message, Submitted
from drumline.contract.outputs import Load, OutputColumns
from drumline.contract.plan import Batch, Plan
from drumline.contract.ports import (
    Clock,
    DataPlane,
    Dispatch,
    DpRound,
    Frontend,
    GrammarCompiler,
    Group,
    Reduce,
)
from drumline.contract.regions import Region
from drumline.contract.request import GenerateRequest
from drumline.contract.specs import DeviceSpecs
from drumline.control.batch_log import BatchLog
from drumline.control.cache_ops import CacheOps
from drumline.control.controls import Controls
from drumline.control.gate import Held, Passed, passed
from drumline.control.grammars import Grammars
from drumline.control.history import HistoryRows
from drumline.control.ingress import Ingress, Limits
from drumline.control.load_report import LoadReport
from drumline.control.operations import (
    Done,
    Gated,
    ProfileStart,
    ProfileStop,
    StateSet,
    WeightsAsked,
)
from drumline.control.output import Outputs
from drumline.control.profiles import Place, Profiles
from drumline.control.records import Records, RoundRecord
from drumline.control.relay import Relay
from drumline.control.request_stats import log_ended
from drumline.control.requests import (
    CLIENT_ERROR,
    CONFLICT,
    NO_CAPACITY,
    TOO_MANY,
    Admitted,
    Ending,
    Reason,
    Refusal,
)
from drumline.control.standing import AbortAll, CancelUnscheduled, Effect, Restore
from drumline.control.weight_ops import WeightOps
from drumline.scheduler.events import HeadEvent, Tick
from drumline.scheduler.scheduler import Scheduler

IDLE_WAIT_S = 0.01
"""How long an idle round waits for a message before it looks at its stop request again."""

_SPARE_WITHHELD = 16
"""Withheld requests that may be over already; fewer are not worth a search."""

_PAUSED = Ending(Reason.ABORT, "the engine was paused, which ended what ran", NO_CAPACITY)

_log = logging.getLogger(__name__)


class StopRequest(Protocol):
    """Whether somebody wants this rank to stop, such as a `threading.Event`."""

    def is_set(self) -> bool:
        """Return whether to stop after this round."""


class Ranks(Struct, frozen=True):
    """The groups that a rank meets every round."""

    replica: Group
    """The ranks that run this scheduler, mirrored; the first holds the frontend's link."""
    world: Group
    """The ranks at this one's place in every replica, whose forwards run in step."""
    members: tuple[int, ...] = (0,)
    """The replica's ranks, as an operator knows them."""
    rank: int = 0
    """This one."""


class _Forward(Struct, frozen=True):
    """A dispatched forward that awaits its commit."""

    batch: Batch
    ticket: int


class EventLoop:
    """One rank's rounds.

    Thread: everything here runs on the control thread.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        data_plane: DataPlane,
        frontend: Frontend | None,
        clock: Clock,
        ranks: Ranks,
        limits: Limits,
        specs: DeviceSpecs,
        in_flight_depth: int,
        grammars: GrammarCompiler | None = None,
        profiles: Place | None = None,
        weight_version: str = "default",
    ) -> None:
        """Wire a loop up. `frontend` is the replica's first member's alone."""
        self._scheduler = scheduler
        self._data_plane = data_plane
        self._frontend = frontend
        self._clock = clock
        self._world = ranks.world
        self._replica = ranks.replica
        self._total_pages = specs.num_pages - 1
        self._depth = in_flight_depth
        self._relay = Relay(ranks.replica, ranks.members)
        self._ingress = Ingress(limits)
        self._outputs = Outputs(specs.max_rows, limits.vocab_size)
        self._controls = Controls(weight_version)
        self._weight_ops = WeightOps(
            data_plane,
            ranks.replica,
            self._converge,
            self._cleared,
            rank=ranks.rank,
            ranks=ranks.replica.size * ranks.world.size,
            discards=specs.discards_weights,
        )
        self._cache_ops = CacheOps(ranks.replica, specs)
        self._grammars = Grammars(grammars, ranks.replica)
        self._history = (
            HistoryRows(specs.history, specs.max_rows, specs.model.max_model_len)
            if specs.history is not None
            else None
        )
        self._load_report = LoadReport()
        self._profiles = Profiles(data_plane, profiles or Place(), clock)
        self._batch_log = BatchLog(ranks.world.index)
        self._in_flight: deque[_Forward] = deque()
        self.records = Records()
        self._withheld: list[Admitted] = []
        self._forwards_allowed = True
        self._world_idle = True
        self._lengths = NO_INTS
        self._tokens = 0
        self._now_us = 0
        self._ahead_us = 0
        """What the relayed clock was ahead of this rank's at the round's head."""

    def run(self, stop: StopRequest) -> None:
        """Run rounds until the ranks agreed to stop.

        Collective: every rank runs the same rounds. What a round raises ends the run, with
        the last rounds' record as its note.
        """
        try:
            while not self.round(stop.is_set()):
                pass
        except Exception as error:
            error.add_note(self.story())
            raise

    def round(self, stop_requested: bool) -> bool:
        """Run one round; returns whether the ranks agreed to stop after it."""
        trace = self._profiles.trace
        received = self._receive()
        stop_requested = stop_requested or self._frontend_gone()
        head_us = self._clock.now_us()
        trace.begin(head_us)
        relayed = self._relay.exchange(received, stop_requested, head_us)
        self._now_us = relayed.now_us
        self._ahead_us = relayed.now_us - head_us
        trace.did("relay")
        self._admit(relayed.messages)
        self._admit_grammars()
        # Memory that is released on any replica leaves no forward a place to run in.
        gate = self._gate()
        trace.did("admit")
        frozen = gate.lacking or self._controls.frozen

        # Head: what this round's plan must know already. Whether forwards are allowed, and
        # which copies are done: whoever waits for one would wait a round longer otherwise.
        facts: list[HeadEvent] = []
        if frozen is self._forwards_allowed:
            self._forwards_allowed = not frozen
            facts.append(Tick(now_us=self._now_us, allow_forward=self._forwards_allowed))
        if self._cache_ops.open:
            facts += self._cache_ops.acknowledged(self._data_plane.poll_cache_acks())
        if facts:
            self._scheduler.advance_head(facts)

        if frozen:
            # No forward will push the queue on.
            self._commit_down_to(0)
        plan = self._scheduler.plan()
        trace.did("plan")
        self._relay.add_plan(plan)
        if plan.cache_ops:
            self._cache_ops.dispatched(plan.cache_ops)
        self._start(plan)
        dp, stop = self._agree_batches(plan.batch, relayed.stop)
        trace.did("agree")
        if dp is not None and dp.idle:
            self._commit_down_to(0)
        # A commit may end requests that the batch still names, so the batch's inputs are
        # gathered before any. A batch whose inputs a pending commit still changes commits
        # the queue here, after the gathering of all others: there is none yet.
        ticket = self._dispatch(plan, self._gather(plan, dp), frozen)
        trace.did("dispatch", self._described(plan) if trace.on else None)
        self._profiles.after_dispatch()
        # Without a new forward nothing would push the queue on, so all of it commits.
        self._commit_down_to(self._depth if ticket is not None else 0)

        trace.did("commit")
        # Tail: what was committed and aborted reaches the scheduler before it plans again.
        outcome = self._outputs.take()
        if outcome.events:
            self._scheduler.advance(outcome.events)
        self._scheduler.drain_kv_events()
        if outcome.released:
            # Queued behind the forwards that may still read what these requests hold.
            self._data_plane.release(outcome.released)
            if self._history is not None:
                self._history.forget(outcome.released)
        self._finish_drain(gate)
        self._send(outcome.columns)
        if outcome.ended and self._relay.owner:
            log_ended(outcome.ended)
        self._record(len(relayed.messages), plan)
        trace.did("tail")
        return stop

    def story(self) -> str:
        """Return the last rounds' record, a line each, oldest first."""
        return self.records.story()

    def check(self) -> None:
        """Raise InvariantError unless the control plane's and the scheduler's state hold."""
        self._outputs.check()
        self._scheduler.check()

    # What arrived

    def _receive(self) -> tuple[Message, ...]:
        if self._frontend is None:
            return ()
        return tuple(self._frontend.receive(IDLE_WAIT_S if self.idle else 0.0))

    def _frontend_gone(self) -> bool:
        return self._frontend is not None and self._frontend.closed

    @property
    def idle(self) -> bool:
        """Whether only a message could give this rank or its peers something to do."""
        return self._world_idle and not self._busy

    @property
    def _busy(self) -> bool:
        """Whether a round gives this rank something to do without any message."""
        if self._in_flight or self._cache_ops.open:
            return True
        return self._scheduling and not self._controls.frozen

    @property
    def _scheduling(self) -> bool:
        """Whether the scheduler holds a live request, in whichever state."""
        return bool(self._scheduler.sizes().live)

    def _admit(self, messages: Iterable[Message]) -> None:
        """Take a round's messages in order: a control operation after the requests before it."""
        arrived: set[str] = set()
        admitted: list[Admitted] = []
        for message in messages:
            match message:
                case Submitted(request):
                    if self._is_new(request, arrived):
                        answer = self._answer(request)
                        if isinstance(answer, Refusal):
                            self._outputs.refuse(answer)
                        elif self._outputs.register(answer.request, self._now_us):
                            admitted.append(answer)
                case AbortAsked(rids):
                    for rid in rids:
                        self._outputs.abort(rid, self._now_us)
                case CallAsked():
                    self._submit(admitted)
                    admitted = []
                    self._carry_out(self._controls.ask(message))
        self._submit(admitted)
        self._outputs.expire(self._now_us)

    def _answer(self, request: GenerateRequest) -> Admitted | Refusal:
        refusing = self._controls.refusing
        if refusing is not None:
            return self._ingress.refusal(request, refusing, NO_CAPACITY)
        return self._ingress.admit(request, self._now_us)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        """Do what a control operation wants done at once; those who are ended are told why."""
        lost = self._controls.lost
        ending = _PAUSED if lost is None else Ending(Reason.ABORT, lost, NO_CAPACITY)
        for effect in effects:
            match effect:
                case CancelUnscheduled():
                    waited = [request.rid for request in self._grammars.cancel()]
                    self._outputs.fail(waited, ending, self._now_us)
                case AbortAll():
                    self._outputs.abort_all(ending, self._now_us)
                case Restore(regions=regions):
                    self._data_plane.restore_memory(regions)

    def _is_new(self, request: GenerateRequest, arrived: set[str]) -> bool:
        """Whether a request's id is free; sorted out before anything is refused or registered."""
        rid = request.rid
        if rid in arrived or self._outputs.holds(rid):
            # Whatever was said under this id would end the stream of the one that runs.
            _log.warning("request %r repeats the id of a live one and is dropped", rid)
            return False
        arrived.add(rid)
        if self._scheduler.knows(rid):
            fault = f"request id {rid!r} is still held by a request that just ended; use a new id"
            self._outputs.refuse(self._ingress.refusal(request, fault, CONFLICT))
            return False
        return True

    def _admit_grammars(self) -> None:
        """Let requests go on whose grammars are ready on every rank; end those whose never are."""
        if not self._grammars.waiting:
            return
        drained = self._grammars.drain(self._outputs.owns)
        for request, ending in drained.failed:
            self._outputs.fail((request.rid,), ending, self._now_us)
        if drained.ready:
            self._submit([replace(each, grammar=grammar) for each, grammar in drained.ready])

    def _submit(self, admitted: list[Admitted]) -> None:
        """Hand requests to the data plane, then to the scheduler, which may refuse them all.

        Those that still need their grammar wait for it first. While the engine is paused
        they are withheld, and go ahead of others afterwards.
        """
        admitted = self._grammars.hold(admitted)
        if self._controls.withholding:
            self._withheld += admitted
            if len(self._withheld) > 2 * self._outputs.running + _SPARE_WITHHELD:
                # A pause may last, and clients come and go meanwhile.
                self._withheld = self._owned(self._withheld)
            return
        if self._withheld:
            admitted = self._withheld + admitted
            self._withheld = []
        admitted = self._queued(self._owned(admitted))
        if not admitted:
            return
        self._data_plane.admit([each.admission for each in admitted])
        for each in admitted:
            each.request.known_to_device = True
            if self._history is not None:
                self._history.admit(each.request.rid, each.spec.tokens)
        attachments = [
            Attachment(each.request.rid, each.grammar)
            for each in admitted
            if each.grammar is not None
        ]
        if attachments:
            self._data_plane.attach_grammars(attachments)
        refused = self._scheduler.submit([each.spec for each in admitted])
        if refused is not None:
            ending = Ending(Reason.ABORT, refused, CLIENT_ERROR)
            self._outputs.fail([each.request.rid for each in admitted], ending, self._now_us)

    def _owned(self, admitted: list[Admitted]) -> list[Admitted]:
        """Return the requests that were not aborted since they arrived."""
        return [each for each in admitted if self._outputs.owns(each.request)]

    def _queued(self, admitted: list[Admitted]) -> list[Admitted]:
        """Return the requests that the queue has room for; the others end here, with 429."""
        kept: list[Admitted] = []
        tokens = 0
        for each in admitted:
            prompt = each.request.prompt_tokens
            full = self._scheduler.crowded(len(kept) + 1, tokens + prompt)
            if full is None:
                kept.append(each)
                tokens += prompt
            else:
                ending = Ending(Reason.ABORT, full, TOO_MANY)
                self._outputs.fail((each.request.rid,), ending, self._now_us)
        return kept

    def _gate(self) -> Passed:
        """Run the control operations that every rank runs in the same round, or none does.

        Collective: every round, on every rank, so that a rank that was asked first never
        waits inside an operation for one that was not.
        """
        gate = passed(self._world, self._held())
        if gate.flush:
            self._controls.flushed(self._cleared())
        if gate.operation is not None and (asked := self._controls.gated) is not None:
            self._carry_out(self._controls.ran(self._run_gated(asked)))
        for wanted in self._controls.take_rows():
            self._controls.told(wanted, self._weight_ops.rows(wanted))
        return gate

    def _run_gated(self, asked: Gated) -> Done:
        """Run what all ranks let pass. Collective: on every rank."""
        match asked:
            case WeightsAsked():
                return self._weight_ops.run(asked)
            case ProfileStart():
                fault = self._profiles.open(asked.asked, self._now_us)
                agreed = self._converge(fault is None)
                begun = self._profiles.settle(agreed)
                why = fault or "another rank cannot record this; its log says why"
                return Done(agreed, begun or why)
            case ProfileStop():
                fault, recorded = self._profiles.stop()
                if not self._converge(fault is None):
                    return Done(False, fault or "another rank wrote no file; its log says why")
                return Done(True, recorded)
            case StateSet():
                fault = self._scheduler.adjust(asked.changes)
                settings = msgspec.json.encode(self._scheduler.adjustable).decode()
                return Done(fault is None, fault or settings)
        assert_never(asked)

    def _cleared(self) -> bool:
        """Forget the prefixes on every rank, or on none. Collective: on every rank."""
        cleared = self._converge(self._scheduler.can_clear())
        if cleared:
            self._scheduler.clear()
        return cleared

    def _held(self) -> Held:
        """Return what this rank brings to the gate."""
        asked = self._controls.gated
        return Held(
            flush=self._controls.flush_wanted,
            operation=None if asked is None else asked.kind,
            release=bool(self._controls.releasing),
            lacking=self._controls.lacking,
        )

    def _converge(self, mine: bool) -> bool:
        """Whether every rank says yes. Collective: over the replica, then the world."""
        (agreed,) = self._replica.all_reduce([int(mine)], Reduce.MIN)
        (agreed,) = self._world.all_reduce([agreed], Reduce.MIN)
        return bool(agreed)

    # The plan and its forward

    def _start(self, plan: Plan) -> None:
        """Apply what the plan decided about requests: ends and rows taken, then rows given."""
        self._outputs.finish_plan_aborts(plan.aborts, self._now_us)
        self._cache_ops.counters.aborts += len(plan.aborts)
        for op in plan.cache_ops:
            if isinstance(op, Snapshot):
                self._outputs.suspend(op.rid, self._now_us)
                if self._history is not None:
                    self._history.suspend(op.rid)
        cached = 0
        for bound in plan.bound:
            tokens = self._scheduler.cached_tokens(bound.rid)
            if self._history is not None:
                self._history.bind(bound)
            if self._outputs.bind(bound, tokens, self._now_us):
                cached += tokens
        self._cache_ops.counters.cached_tokens += cached
        # One member speaks for the replica: the others would say the same.
        if plan.batch is not None and self._relay.owner and self._batch_log.due(plan.batch):
            kept = self._scheduler.free_pages() - self._scheduler.empty_pages
            self._batch_log.write(plan.batch, cached, self._load(), kept, self._now_us)

    def _agree_batches(self, batch: Batch | None, stop: bool) -> tuple[DpRound | None, bool]:
        """Tell the world's ranks this one's batch; returns theirs, and whether any rank stops.

        Collective: every round, on every rank of the world. A batch without tokens is no work.
        """
        tokens = 0
        if batch is not None:
            if batch.input_lengths is not self._lengths:
                # The scheduler hands out the same array while its batch lasts.
                self._lengths, self._tokens = batch.input_lengths, batch.tokens
            tokens = self._tokens
        if self._world.size == 1:
            return None, stop
        mine = [0, 0, 0, int(stop), int(self._busy)]
        if tokens and batch is not None:
            mine[:3] = tokens, batch.size, batch.extends
        every, rows, extends, stops, busy = zip(*self._world.all_gather_ints(mine), strict=True)
        # Whoever waits for a message keeps the others waiting, in the next exchange.
        self._world_idle = not any(busy)
        return DpRound(every, rows, extends, not tokens and any(every)), any(stops)

    def _gather(self, plan: Plan, dp: DpRound | None) -> Dispatch:
        """Gather what a forward reads besides its plan."""
        if plan.batch is None:
            return Dispatch(dp=dp)
        history = None if self._history is None else self._history.seeds(plan.batch)
        return Dispatch(self._outputs.logprob_plan(plan.batch), dp, history)

    def _dispatch(self, plan: Plan, dispatch: Dispatch, frozen: bool) -> int | None:
        """Hand a round's work to the data plane; returns the ticket of its forward, if any.

        A rank without work beside one with some runs an idle forward in a batch's place.
        """
        if plan.batch is not None and not self._tokens:
            plan = replace(plan, batch=None)
        idle = dispatch.dp if dispatch.dp is not None and dispatch.dp.idle else None
        if frozen:
            if plan.needs_device:
                self._data_plane.execute(plan, Dispatch())
            if idle is not None:
                self._data_plane.idle_forward(idle)
            return None
        if not plan.needs_device and idle is None:
            return None
        if plan.batch is not None:
            self._profiles.before_forward(plan.batch)
        ticket = self._data_plane.execute(plan, dispatch)
        if ticket is not None and plan.batch is not None:
            self._in_flight.append(_Forward(plan.batch, ticket))
        return ticket

    def _described(self, plan: Plan) -> dict[str, Any]:
        """Return what a profile tells of a plan."""
        batch = plan.batch
        if batch is None:
            return {"round": plan.round}
        return {
            "round": plan.round,
            "rows": batch.size,
            "tokens": batch.tokens,
            "prompts": batch.extends,
            "requests": self._outputs.rids(batch.rows),
        }

    def _commit_down_to(self, depth: int) -> None:
        """Commit the oldest forwards until at most `depth` are in flight."""
        while len(self._in_flight) > depth:
            forward = self._in_flight.popleft()
            result = self._data_plane.complete(forward.ticket)
            self._relay.add_result(result)
            if self._history is not None:
                self._history.commit(forward.batch, result)
            # A forward is waited for, so its tokens are later than the round's head. This
            # rank's own clock says by how much; such times are told and decide nothing.
            told_us = self._clock.now_us() + self._ahead_us
            self._outputs.commit(forward.batch, result, told_us)
            self._batch_log.committed(len(result.tokens))

    def _finish_drain(self, gate: Passed) -> None:
        """Tell a pause that waits for it that nothing runs any more; release memory."""
        drained = not self._in_flight and not self._scheduling
        if drained and self._controls.draining:
            self._controls.drained()
        if gate.release:
            self._release(drained)

    def _release(self, drained: bool) -> None:
        """Give memory back on every rank, once none can need it any more.

        Collective: on every rank of the engine, in the rounds in which the gate says that some
        replica waits for it. A replica that is not asked yet could still admit a request, so
        it holds the others up.
        """
        regions = self._controls.releasing
        clears = Region.KV_CACHE in regions
        ready = bool(regions) and drained and not self._cache_ops.open
        ready = ready and self._controls.gated is None
        if not self._converge(ready and not (clears and not self._scheduler.can_clear_l1())):
            return
        if clears:
            self._scheduler.clear_l1()
        # What cannot be taken back is let go once every rank has let go of the rest.
        drops = self._controls.drops
        kept = tuple(each for each in regions if not (drops and each is Region.WEIGHTS))
        fault = self._data_plane.release_memory(kept)
        if not self._converge(fault is None):
            if fault is None:
                self._data_plane.restore_memory(kept)
                fault = "another rank could not"
            self._controls.released(fault)
            return
        if drops:
            self._data_plane.drop_weights()
        self._controls.released(None)
        _log.info("released %s", ", ".join(regions))

    # What is told

    def _send(self, columns: OutputColumns) -> None:
        """Send the round's outputs with the load, and the answers that are due."""
        load = self._load()
        if self._controls.cache_state_wanted:
            state = self._cache_ops.state(self._scheduler)
            self._controls.cache_state(msgspec.json.encode(state).decode())
        if self._controls.state_wanted:
            stands = msgspec.json.encode(self._stands(load)).decode()
            self._controls.told_state(stands)
        replies = self._controls.take_replies()
        if self._frontend is None:
            return
        if self._load_report.due(load, bool(columns), self._now_us):
            self._frontend.send(columns, load)
        for reply in replies:
            self._frontend.reply(reply)

    def _stands(self, load: Load) -> InternalState:
        """Return how the replica stands now."""
        return InternalState(
            round=self._relay.round,
            standing=self._controls.standing,
            released=self._controls.gone,
            weight_version=self._controls.weight_version,
            profiling=self._profiles.running,
            withheld=len(self._owned(self._withheld)),
            in_flight=len(self._in_flight),
            running=load.num_running,
            waiting=load.num_waiting,
            settings=self._scheduler.adjustable,
        )

    def _load(self) -> Load:
        """Return what the engine holds now."""
        return Load(
            num_running=self._outputs.running,
            num_waiting=self._scheduler.sizes().waiting,
            kv_active_pages=self._scheduler.active_pages(),
            kv_total_pages=self._total_pages,
        )

    def _record(self, messages: int, plan: Plan) -> None:
        batch = plan.batch
        self.records.add(
            RoundRecord(
                digest=self._relay.close(),
                now_us=self._now_us,
                messages=messages,
                rows=batch.size if batch else 0,
                tokens=self._tokens if batch else 0,
                in_flight=len(self._in_flight),
                running=self._outputs.running,
            )
        )
