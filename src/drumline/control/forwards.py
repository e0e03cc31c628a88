"""Forwards, from a plan's batch to its commit: agreed on, dispatched, in flight, committed.

It owns the forwards in flight. Whose forward it is and what its tokens mean is for the
modules that it hands the results to.
"""

from collections import deque
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from drumline.contract.arrays import NO_INTS
from drumline.contract.plan import Batch, Plan
from drumline.contract.ports import Clock, DataPlane, Dispatch, DpRound, Group
from drumline.contract.result import ForwardResult, decode_result, encode_result
from drumline.control.batch_log import BatchLog
from drumline.control.history import HistoryRows
from drumline.control.output import Outputs
from drumline.control.profiles import Profiles
from drumline.control.relay import Relay


class _Forward(Struct, frozen=True):
    """A dispatched forward that awaits its commit."""

    batch: Batch
    ticket: int


class Forwards:
    """The forwards of one rank, in step with those of the world's other ranks.

    `pipeline` are the ranks at this one's place in every stage, in stage order; None where
    there is one stage.
    """

    def __init__(
        self,
        *,
        data_plane: DataPlane,
        clock: Clock,
        world: Group,
        pipeline: Group | None,
        relay: Relay,
        outputs: Outputs,
        history: HistoryRows | None,
        profiles: Profiles,
        batch_log: BatchLog,
        depth: int,
    ) -> None:
        self._data_plane = data_plane
        self._clock = clock
        self._world = world
        self._pipeline = pipeline
        self._relay = relay
        self._outputs = outputs
        self._history = history
        self._profiles = profiles
        self._batch_log = batch_log
        self._depth = depth
        self._in_flight: deque[_Forward] = deque()
        self._lengths = NO_INTS
        self.world_idle = True
        """Whether no rank of the world had anything to do in the last round."""
        self.tokens = 0
        """Those that the last batch feeds."""
        self.ahead_us = 0
        """What the relayed clock was ahead of this rank's at the round's head."""

    def __len__(self) -> int:
        return len(self._in_flight)

    def agree(self, batch: Batch | None, stop: bool, busy: bool) -> tuple[DpRound | None, bool]:
        """Tell the world's ranks this one's batch; returns theirs, and whether any rank stops.

        Collective: every round, on every rank of the world. A batch without tokens is no work.
        """
        tokens = 0
        if batch is not None:
            if batch.input_lengths is not self._lengths:
                # The scheduler hands out the same array while its batch lasts.
                self._lengths, self.tokens = batch.input_lengths, batch.tokens
            tokens = self.tokens
        if self._world.size == 1:
            return None, stop
        mine = [0, 0, 0, int(stop), int(busy)]
        if tokens and batch is not None:
            mine[:3] = tokens, batch.size, batch.extends
        every, rows, extends, stops, anybody = zip(*self._world.all_gather_ints(mine), strict=True)
        # Whoever waits for a message keeps the others waiting, in the next exchange.
        self.world_idle = not any(anybody)
        return DpRound(every, rows, extends, not tokens and any(every)), any(stops)

    def dispatch(self, plan: Plan, dp: DpRound | None, frozen: bool) -> bool:
        """Hand a round's work to the data plane; returns whether a forward is in flight with it.

        A rank without work beside one with some runs an idle forward in a batch's place.
        """
        # A commit may end requests that the batch still names, so what the batch reads is
        # gathered before any. A batch whose inputs a pending commit still changes commits
        # the queue here, after the gathering of all others: there is none yet.
        dispatch = self._gather(plan, dp)
        if plan.batch is not None and not self.tokens:
            plan = replace(plan, batch=None)
        idle = dp if dp is not None and dp.idle else None
        if frozen:
            if plan.needs_device:
                self._data_plane.execute(plan, Dispatch())
            if idle is not None:
                self._data_plane.idle_forward(idle)
            return False
        if not plan.needs_device and idle is None:
            return False
        if plan.batch is not None:
            self._profiles.before_forward(plan.batch)
        ticket = self._data_plane.execute(plan, dispatch)
        if ticket is None or plan.batch is None:
            return False
        self._in_flight.append(_Forward(plan.batch, ticket))
        return True

    def commit(self, dispatched: bool) -> None:
        """Commit down to the depth, or, where nothing was dispatched, the oldest at least.

        Nothing else would push the queue on then. Of a pipeline it must not be all of it: the
        rows of the oldest are what the first stage computes while the last one finishes the
        others.
        """
        if dispatched:
            self.commit_down_to(self._depth)
        elif self._in_flight:
            self.commit_down_to(min(self._depth, len(self._in_flight) - 1))

    def commit_down_to(self, depth: int) -> None:
        """Commit the oldest forwards until at most `depth` are in flight."""
        while len(self._in_flight) > depth:
            forward = self._in_flight.popleft()
            result = self._adopted(self._data_plane.complete(forward.ticket))
            self._relay.add_result(result)
            if self._history is not None:
                self._history.commit(forward.batch, result)
            # A forward is waited for, so its tokens are later than the round's head. This
            # rank's own clock says by how much; such times are told and decide nothing.
            told_us = self._clock.now_us() + self.ahead_us
            self._outputs.commit(forward.batch, result, told_us)
            self._batch_log.committed(len(result.tokens))

    def _adopted(self, result: ForwardResult) -> ForwardResult:
        """Return what the last stage made of a forward: it alone samples.

        Collective: over the pipeline, once a commit.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return result
        last = pipeline.size - 1
        if pipeline.index == last:
            pipeline.broadcast(last, encode_result(result))
            return result
        return decode_result(pipeline.broadcast(last, b""))

    def described(self, plan: Plan) -> dict[str, Any]:
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

    def _gather(self, plan: Plan, dp: DpRound | None) -> Dispatch:
        """Gather what a forward reads besides its plan."""
        if plan.batch is None:
            return Dispatch(dp=dp)
        history = None if self._history is None else self._history.seeds(plan.batch)
        return Dispatch(self._outputs.logprob_plan(plan.batch), dp, history)
