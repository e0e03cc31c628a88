"""The event loop of one rank: what happens in a round, and in which order.

`EventLoop.round` is the schedule; each step belongs to a module that owns its state,
is called once and returns what must happen. The scheduler advances here and nowhere
else. Nothing in this package can reach a device: the only door is `DataPlane`, whose
operations are queued, and only `complete` waits.

Every rank of a replica runs the same rounds on the same inputs. A group of one takes
the same path.
"""

from typing import Protocol

import msgspec
from msgspec import Struct

from drumline.contract.cache import Snapshot
from drumline.contract.internal_state import InternalState
from drumline.contract.messages import Message
from drumline.contract.outputs import Load, OutputColumns
from drumline.contract.plan import Plan
from drumline.contract.ports import Clock, DataPlane, Frontend, GrammarCompiler, Group
from drumline.contract.specs import DeviceSpecs
from drumline.control.agreements import Agreements
from drumline.control.arrivals import Arrivals
from drumline.control.batch_log import BatchLog
from drumline.control.cache_ops import CacheOps
from drumline.control.controls import Controls
from drumline.control.forwards import Forwards
from drumline.control.grammars import Grammars
from drumline.control.history import HistoryRows
from drumline.control.ingress import Ingress, Limits
from drumline.control.load_report import LoadReport
from drumline.control.output import Outputs
from drumline.control.profiles import Place, Profiles
from drumline.control.records import Records, RoundRecord
from drumline.control.relay import Relay
from drumline.control.request_stats import log_ended
from drumline.scheduler.events import HeadEvent, Tick
from drumline.scheduler.scheduler import Scheduler

IDLE_WAIT_S = 0.01
"""How long an idle round waits for a message before it looks at its stop request again."""


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
    pipeline: Group | None = None
    """The ranks at this one's place in every stage, in stage order; None for a single stage."""
    members: tuple[int, ...] = (0,)
    """The replica's ranks, as an operator knows them."""
    rank: int = 0
    """This one."""


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
        self._total_pages = specs.num_pages - 1
        self._relay = Relay(ranks.replica, ranks.members)
        self._outputs = Outputs(specs.max_rows, limits.vocab_size)
        self._controls = Controls(weight_version)
        self._cache_ops = CacheOps(ranks.replica, specs)
        self._history = (
            HistoryRows(specs.history, specs.max_rows, specs.model.max_model_len)
            if specs.history is not None
            else None
        )
        self._load_report = LoadReport()
        self._profiles = Profiles(data_plane, profiles or Place(), clock)
        self._batch_log = BatchLog(ranks.world.index)
        self._arrivals = Arrivals(
            Ingress(limits),
            self._outputs,
            self._controls,
            Grammars(grammars, ranks.replica),
            self._history,
            scheduler,
            data_plane,
        )
        self._agreements = Agreements(
            replica=ranks.replica,
            world=ranks.world,
            rank=ranks.rank,
            controls=self._controls,
            profiles=self._profiles,
            scheduler=scheduler,
            data_plane=data_plane,
            specs=specs,
        )
        self._forwards = Forwards(
            data_plane=data_plane,
            clock=clock,
            world=ranks.world,
            pipeline=ranks.pipeline,
            relay=self._relay,
            outputs=self._outputs,
            history=self._history,
            profiles=self._profiles,
            batch_log=self._batch_log,
            depth=in_flight_depth,
        )
        self.records = Records()
        self._forwards_allowed = True
        self._now_us = 0

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
        now_us = self._now_us = relayed.now_us
        self._forwards.ahead_us = now_us - head_us
        trace.did("relay")
        self._arrivals.take(relayed.messages, now_us)
        self._arrivals.take_grammars(now_us)
        # Memory that is released on any replica leaves no forward a place to run in.
        gate, effects = self._agreements.gate(now_us)
        self._arrivals.carry_out(effects, now_us)
        trace.did("admit")
        frozen = gate.lacking or self._controls.frozen

        # Head: what this round's plan must know already. Whether forwards are allowed, and
        # which copies are done: whoever waits for one would wait a round longer otherwise.
        facts: list[HeadEvent] = []
        if frozen is self._forwards_allowed:
            self._forwards_allowed = not frozen
            facts.append(Tick(now_us=now_us, allow_forward=self._forwards_allowed))
        if self._cache_ops.open:
            facts += self._cache_ops.acknowledged(self._data_plane.poll_cache_acks())
        if facts:
            self._scheduler.advance_head(facts)

        if frozen:
            # No forward will push the queue on.
            self._forwards.commit_down_to(0)
        plan = self._scheduler.plan()
        trace.did("plan")
        self._relay.add_plan(plan)
        if plan.cache_ops:
            self._cache_ops.dispatched(plan.cache_ops)
        self._start(plan)
        dp, stop = self._forwards.agree(plan.batch, relayed.stop, self._busy)
        trace.did("agree")
        if dp is not None and dp.idle:
            self._forwards.commit_down_to(0)
        dispatched = self._forwards.dispatch(plan, dp, frozen)
        trace.did("dispatch", self._forwards.described(plan) if trace.on else None)
        self._profiles.after_dispatch()
        self._forwards.commit(dispatched)

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
        drained = not self._forwards and not self._scheduling
        self._agreements.finish_drain(gate, drained, copying=bool(self._cache_ops.open))
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
        return self._forwards.world_idle and not self._busy

    @property
    def _busy(self) -> bool:
        """Whether a round gives this rank something to do without any message."""
        if self._forwards or self._cache_ops.open:
            return True
        return self._scheduling and not self._controls.frozen

    @property
    def _scheduling(self) -> bool:
        """Whether the scheduler holds a live request, in whichever state."""
        return bool(self._scheduler.sizes().live)

    # The plan

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
            withheld=self._arrivals.withheld,
            in_flight=len(self._forwards),
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
                tokens=self._forwards.tokens if batch else 0,
                in_flight=len(self._forwards),
                running=self._outputs.running,
            )
        )
