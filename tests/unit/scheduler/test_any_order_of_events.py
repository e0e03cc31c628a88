"""Whatever happens in whatever order, every page is accounted for and mirrors agree."""

import os

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_rig import Rig, config

from drumline.contract.plan import encode_plan
from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.core.config import WritePolicy
from drumline.scheduler.events import Aborted, Finished, Reserved
from drumline.scheduler.lifecycle import State

FULL = CacheGroup(group_id="full", block_tokens=4)
PACKED = CacheGroup(group_id="packed", block_tokens=2, blocks_per_parent=3)
WINDOW = CacheGroup(
    group_id="window", kind=AttentionKind.SLIDING_WINDOW, block_tokens=4, window_tokens=6
)
SMALL_WINDOW = CacheGroup(
    group_id="small",
    kind=AttentionKind.SLIDING_WINDOW,
    block_tokens=2,
    window_tokens=3,
    blocks_per_parent=2,
)
STATE = CacheGroup(group_id="state", kind=AttentionKind.STATE, block_tokens=0)
PACKED_STATE = CacheGroup(
    group_id="packed state", kind=AttentionKind.STATE, block_tokens=0, blocks_per_parent=3
)
MAY_FINISH = (State.PREFILLED, State.DECODING, State.RETRACTED, State.RESTORING)
SHAPES = [
    (FULL,),
    (FULL,),
    (PACKED,),
    (FULL, WINDOW),
    (PACKED, WINDOW, SMALL_WINDOW),
    (FULL, PACKED),
    (WINDOW,),
    (FULL, STATE),
    (PACKED, WINDOW, PACKED_STATE, STATE),
    (SMALL_WINDOW, PACKED_STATE),
]


class SchedulerMachine(RuleBasedStateMachine):
    """Two schedulers fed the same events; everything is checked after every step."""

    @initialize(
        pages=st.integers(8, 40),
        rows=st.integers(1, 6),
        budget=st.integers(2, 24),
        flow=st.sampled_from([(0, 1), (0, 1), (1, 1), (1, 1), (0, 2), (0, 3)]),
        mixed=st.booleans(),
        caching=st.booleans(),
        sharing=st.booleans(),
        promoting=st.booleans(),
        parts=st.sampled_from([1, 2]),
        width=st.sampled_from([1, 1, 3]),
        groups=st.sampled_from(SHAPES),
        images=st.sampled_from([(1, 0), (1, 0), (12, 3), (40, 2)]),
        interval=st.sampled_from([0, 0, 3]),
        policy=st.fixed_dictionaries(
            {
                "priorities": st.booleans(),
                "patience": st.sampled_from([None, 1, 4]),
                "max_queued_requests": st.sampled_from([None, 2]),
                "max_queued_tokens": st.sampled_from([None, 50]),
                "mixed_prefill_tokens": st.sampled_from([None, 3]),
                "prefix_replay_tokens": st.sampled_from([0, 0, 6]),
            }
        ),
        host=st.sampled_from([1, 1, 2, 4, 12, 60]),
        writes=st.sampled_from(WritePolicy),
    )
    def start(
        self,
        pages,
        rows,
        budget,
        flow,
        mixed,
        caching,
        sharing,
        promoting,
        parts,
        width,
        groups,
        images,
        interval,
        host,
        writes,
        policy,
    ):
        cfg = config(
            groups=groups,
            prefix_granularity=4 * parts,
            num_pages=pages,
            max_rows=rows,
            max_scheduled_tokens=budget,
            overlap_depth=flow[0],
            stages=flow[1],
            mixed_batch=mixed,
            prefix_caching=caching,
            share_in_flight=sharing,
            promote_windows=promoting,
            decode_tokens=width,
            num_host_pages=host if caching else 1,
            host_write_policy=writes,
            num_snapshot_pages=images[0],
            max_retracted_requests=images[1],
            debug_force_retraction_interval=interval if images[1] else 0,
            **policy,
        )
        self.rig, self.mirror = Rig(cfg), Rig(cfg)
        self.names = iter(f"r{number}" for number in range(10**6))
        self.live: list[str] = []

    def both(self, what):
        return what(self.rig), what(self.mirror)

    @rule(
        heads=st.integers(0, 2),
        tokens=st.integers(1, 40),
        tail=st.integers(0, 3),
        budget=st.sampled_from([0, 0, 1, 5, 20]),
        salt=st.sampled_from(["", "", "", "x"]),
        priority=st.integers(-1, 1),
    )
    def submit(self, heads, tokens, tail, budget, salt, priority):
        rid = next(self.names)
        ids = [heads * 100 + at for at in range(tokens)] + [
            at * 7 % 50 for at in range(tokens, tokens + tail)
        ]
        one, two = self.both(
            lambda rig: rig.submit(
                rid, ids, max_new_tokens=budget, cache_salt=salt, priority=priority
            )
        )
        assert one == two
        if one is None:
            self.live.append(rid)

    @rule()
    def plan(self):
        cfg = self.rig.config
        if len(self.rig.in_flight) > (cfg.overlap_depth if cfg.stages == 1 else cfg.stages):
            self.both(lambda rig: rig.commit())
        one, two = self.both(lambda rig: rig.plan())
        assert encode_plan(one) == encode_plan(two)
        for abort in one.aborts:
            self.live.remove(abort.rid)

    @precondition(lambda self: self.rig.in_flight)
    @rule(count=st.integers(1, 3))
    def commit(self, count):
        self.both(lambda rig: rig.commit(min(count, rig.config.decode_tokens)))

    @precondition(lambda self: self.rig.unacknowledged)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def acknowledge(self, data, ok):
        which = data.draw(st.integers(0, len(self.rig.unacknowledged) - 1))
        self.both(lambda rig: rig.acknowledge(which, ok=ok))

    @rule(rounds=st.integers(1, 8))
    def run(self, rounds):
        for _ in range(rounds):
            self.plan()
            while self.rig.in_flight:
                self.both(lambda rig: rig.commit(rig.config.decode_tokens))

    @precondition(lambda self: self.rig.scheduler.sizes().decoding)
    @rule(data=st.data(), tokens=st.integers(0, 14))
    def reserve(self, data, tokens):
        states = {rid: self.rig.scheduler._requests.get(rid).state for rid in self.live}
        rids = [rid for rid, state in states.items() if state is State.DECODING]
        if rids:
            rid = data.draw(st.sampled_from(rids))
            self.both(lambda rig: rig.scheduler.advance([Reserved(rid, tokens)]))

    @rule()
    def acknowledge_all(self):
        while self.rig.unacknowledged:
            self.both(lambda rig: rig.acknowledge())

    @precondition(lambda self: self.rig.config.num_host_pages > 1)
    @rule()
    def finish_all_and_clear_the_device(self):
        for rid in list(self.live):
            state = self.rig.scheduler._requests.get(rid).state
            if state in MAY_FINISH:
                self.live.remove(rid)
                self.both(lambda rig, rid=rid: rig.finish(rid))
        while self.rig.in_flight:
            self.both(lambda rig: rig.commit())
        self.plan()
        self.acknowledge_all()
        one, two = self.both(lambda rig: rig.scheduler.clear_l1())
        assert one == two

    @precondition(lambda self: self.rig.config.num_host_pages > 1)
    @rule(fail=st.sampled_from([True, False, False]))
    def loads_fail_or_do_not(self, fail):
        self.rig.loads_fail = self.mirror.loads_fail = fail

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        rid = data.draw(st.sampled_from(self.live))
        request = self.rig.scheduler._requests.get(rid)
        may_finish = request.state in MAY_FINISH
        event = (Finished if may_finish and data.draw(st.booleans()) else Aborted)(rid)
        self.live.remove(rid)
        self.both(lambda rig: rig.scheduler.advance([event]))

    @invariant()
    def everything_is_accounted_for(self):
        if hasattr(self, "rig"):
            self.rig.scheduler.check()

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        for rid in self.live:
            self.rig.abort(rid)
        while self.rig.in_flight:
            self.rig.commit()
        while self.rig.unacknowledged:
            self.rig.acknowledge()
        assert self.rig.at_baseline()
        assert not self.rig.scheduler._host.pool.refs.any()
        assert self.rig.scheduler.clear()
        assert self.rig.scheduler.empty_pages == self.rig.config.num_pages - 1
        assert self.rig.scheduler._host.pool.empty == self.rig.config.num_host_pages - 1
        self.rig.scheduler.check()


TestAnyOrderOfEvents = SchedulerMachine.TestCase
EXAMPLES = int(os.environ.get("DRUMLINE_SOAK_EXAMPLES", "60"))
TestAnyOrderOfEvents.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=40, deadline=None
)


def test_the_arrays_of_a_plan_never_change():
    rig = Rig(num_pages=12, max_rows=3)
    plans, copies = [], []
    for number in range(60):
        if number % 4 == 0:
            rig.submit(f"r{number}", 5 + number % 3)
        plan = rig.scheduler.plan()
        plans.append(plan)
        copies.append(encode_plan(plan))
        if plan.batch is not None:
            rig.in_flight.append(plan.batch)
            rig.commit()
        if number % 5 == 4:
            rig.abort(*[f"r{older}" for older in range(0, number - 6, 4)])
    assert [encode_plan(plan) for plan in plans] == copies
    arrays = [plan.batch.rows for plan in plans if plan.batch is not None]
    assert arrays
    assert not any(array.flags.writeable for array in arrays)


def test_a_steady_batch_is_the_same_arrays_round_after_round():
    rig = Rig(num_pages=64)
    for name in "abc":
        rig.submit(name, 6)
    rig.round()  # a computes the prefix of all
    rig.round()
    rig.round()
    first = rig.scheduler.plan()
    rig.in_flight.append(first.batch)
    rig.commit()
    second = rig.scheduler.plan()
    assert second.batch.rows is first.batch.rows
    assert second.batch.generations is first.batch.generations
    assert second.batch.input_lengths is first.batch.input_lengths
    assert np.array_equal(second.batch.prefix_lengths, first.batch.prefix_lengths + 1)
