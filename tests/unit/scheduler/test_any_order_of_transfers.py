"""Whatever becomes of transfers, in whatever order: contents are right, blocks are accounted for.

Two schedulers of a role are fed the same and plan alike.
"""

import os

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from peer_rig import PeerRig
from scheduler_rig import config

from drumline.contract.plan import encode_plan
from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.core.config import Role
from drumline.scheduler.events import Aborted, Bootstrapped, Finished, RemotePrefilled, Tick
from drumline.scheduler.lifecycle import State

FULL = CacheGroup(group_id="full", block_tokens=4)
PACKED = CacheGroup(group_id="packed", block_tokens=2, blocks_per_parent=3)
WINDOW = CacheGroup(
    group_id="window", kind=AttentionKind.SLIDING_WINDOW, block_tokens=4, window_tokens=6
)
STATE = CacheGroup(group_id="state", kind=AttentionKind.STATE, block_tokens=0)
SHAPES = [(FULL,), (PACKED,), (FULL, WINDOW), (FULL, PACKED), (FULL, STATE), (WINDOW, STATE)]
MAY_FINISH = (State.PREFILLED, State.DECODING, State.RETRACTED, State.RESTORING)


class TransferMachine(RuleBasedStateMachine):
    """Two schedulers of one role, and peers that do as they like."""

    @initialize(
        role=st.sampled_from([Role.PREFILL, Role.DECODE]),
        pages=st.sampled_from([12, 24, 60]),
        rows=st.integers(1, 6),
        budget=st.sampled_from([4, 16, 64]),
        depth=st.integers(0, 1),
        caching=st.sampled_from([True, True, False]),
        sharing=st.booleans(),
        width=st.sampled_from([1, 1, 3]),
        groups=st.sampled_from(SHAPES),
        images=st.sampled_from([(1, 0), (24, 3)]),
        host=st.sampled_from([1, 16]),
    )
    def start(
        self, role, pages, rows, budget, depth, caching, sharing, width, groups, images, host
    ):
        if role is Role.PREFILL:
            images, width = (1, 0), 1
        cfg = config(
            role=role,
            groups=groups,
            num_pages=pages,
            max_rows=rows,
            max_scheduled_tokens=budget,
            overlap_depth=depth,
            prefix_caching=caching,
            share_in_flight=sharing,
            decode_tokens=width,
            num_host_pages=host if caching else 1,
            num_snapshot_pages=images[0],
            max_retracted_requests=images[1],
        )
        self.sides = PeerRig(role, cfg), PeerRig(role, cfg)
        self.side = self.sides[0]
        self.depth = depth
        self.names = iter(f"r{number}" for number in range(10**6))
        self.live: list[str] = []
        self.retiring: list[str] = []

    def both(self, what):
        return [what(side) for side in self.sides]

    def state(self, rid):
        return self.side.scheduler._requests.get(rid).state

    @rule(
        head=st.integers(0, 1),
        tokens=st.integers(1, 24),
        tail=st.integers(0, 3),
        budget=st.sampled_from([0, 0, 1, 9]),
        known=st.booleans(),
    )
    def submit(self, head, tokens, tail, budget, known):
        rid = next(self.names)
        ids = [head * 100 + at for at in range(tokens)] + [900 + tail] * (tail > 0)
        one, two = self.both(lambda side: side.submit(rid, ids, max_new_tokens=budget))
        assert one == two
        if one is None:
            self.live.append(rid)
            if known:
                self.both(lambda side: side.tell(Bootstrapped(rid)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def bootstrap(self, data):
        rid = data.draw(st.sampled_from(self.live))
        self.both(lambda side: side.tell(Bootstrapped(rid)))

    @rule()
    def plan(self):
        while len(self.side.rig.in_flight) > self.depth:
            self.both(lambda side: side.rig.commit())
        one, two = self.both(lambda side: side.plan())
        assert encode_plan(one) == encode_plan(two)
        for abort in one.aborts:
            self.live.remove(abort.rid)

    @rule(rounds=st.integers(1, 6))
    def run(self, rounds):
        for _ in range(rounds):
            self.plan()
            while self.side.rig.in_flight:
                self.both(lambda side: side.rig.commit(side.rig.config.decode_tokens))

    @precondition(lambda self: self.side.rig.in_flight)
    @rule()
    def commit(self):
        self.both(lambda side: side.rig.commit())

    @precondition(lambda self: self.side.rig.unacknowledged)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def acknowledge(self, data, ok):
        which = data.draw(st.integers(0, len(self.side.rig.unacknowledged) - 1))
        self.both(lambda side: side.rig.acknowledge(which, ok=ok))

    @rule(forward=st.sampled_from([True, True, False]))
    def freeze_or_thaw(self, forward):
        self.both(lambda side: side.scheduler.advance_head([Tick(allow_forward=forward)]))

    # -- what peers do ----------------------------------------------------------------

    @precondition(lambda self: set(self.side.coming) - set(self.retiring))
    @rule(data=st.data())
    def arrive(self, data):
        rid = data.draw(st.sampled_from(sorted(set(self.side.coming) - set(self.retiring))))
        self.both(lambda side: side.arrive(rid))

    @precondition(lambda self: set(self.side.going) - set(self.retiring))
    @rule(data=st.data())
    def succeed(self, data):
        rid = data.draw(st.sampled_from(sorted(set(self.side.going) - set(self.retiring))))
        self.live.remove(rid)
        self.both(lambda side: side.succeed(rid))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data):
        rid = data.draw(st.sampled_from(self.live))
        self.live.remove(rid)
        self.both(lambda side: side.fail(rid))

    @precondition(lambda self: self.retiring)
    @rule(well=st.booleans())
    def retire(self, well):
        rid = self.retiring.pop(0)
        if well and rid in self.side.coming:
            for side in self.sides:
                del side.coming[rid]
            self.both(lambda side: side.tell(RemotePrefilled(rid, 7)))
        elif well and rid in self.side.going:
            self.both(lambda side: side.succeed(rid))
        else:
            self.both(lambda side: side.fail(rid))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), finish=st.booleans())
    def end(self, data, finish):
        rid = data.draw(st.sampled_from(self.live))
        event = (Finished if finish and self.state(rid) in MAY_FINISH else Aborted)(rid)
        self.live.remove(rid)
        self.both(lambda side: side.tell(event))
        if self.state(rid) is State.RETIRING:
            self.retiring.append(rid)

    @invariant()
    def everything_is_accounted_for(self):
        if hasattr(self, "side"):
            self.side.scheduler.check()

    def teardown(self):
        if not hasattr(self, "side"):
            return
        side, scheduler = self.side, self.side.scheduler
        for rid in self.live:
            side.rig.abort(rid)
        held = scheduler.sizes().transferring
        for rid in [*self.live, *self.retiring]:
            side.fail(rid)
        while side.rig.in_flight:
            side.rig.commit()
        while side.rig.unacknowledged:
            side.rig.acknowledge()
        assert held == 0 or scheduler.sizes().transferring == 0
        assert side.rig.at_baseline()
        assert scheduler.clear()
        assert scheduler.empty_pages == side.rig.config.num_pages - 1
        scheduler.check()


EXAMPLES = int(os.environ.get("DRUMLINE_SOAK_EXAMPLES", "30"))
TestAnyOrderOfTransfers = TransferMachine.TestCase
TestAnyOrderOfTransfers.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=30, deadline=None
)
