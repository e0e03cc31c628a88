"""Whatever storage answers, and whenever: contents are right, all memory is accounted for.

Two schedulers are fed the same and plan alike. Prompts are few and come again, and what is
cached is thrown away often, so that storage is where most of them are found.
"""

import os

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_rig import config
from storage_rig import StorageRig, limits

from drumline.contract.plan import encode_plan
from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.contract.storage import StoragePressure
from drumline.core.config import WritePolicy
from drumline.scheduler.events import Aborted, Finished
from drumline.scheduler.lifecycle import State

FULL = CacheGroup(group_id="full", block_tokens=4)
PACKED = CacheGroup(group_id="packed", block_tokens=2, blocks_per_parent=3)
WINDOW = CacheGroup(
    group_id="window", kind=AttentionKind.SLIDING_WINDOW, block_tokens=4, window_tokens=6
)
STATE = CacheGroup(group_id="state", kind=AttentionKind.STATE, block_tokens=0)
SHAPES = [(FULL,), (PACKED,), (FULL, WINDOW), (FULL, PACKED), (FULL, STATE)]
MAY_FINISH = (State.PREFILLED, State.DECODING, State.RETRACTED, State.RESTORING)


class StorageMachine(RuleBasedStateMachine):
    """Two schedulers, their storage, and workers that answer when they like."""

    @initialize(
        pages=st.sampled_from([24, 40, 100]),
        rows=st.integers(1, 6),
        budget=st.sampled_from([8, 24, 64]),
        groups=st.sampled_from(SHAPES),
        images=st.sampled_from([(1, 0), (12, 3)]),
        host=st.sampled_from([10, 24, 60]),
        writes=st.sampled_from(WritePolicy),
        sharing=st.booleans(),
        few=st.sampled_from(
            [
                {},
                {"max_operations": 2},
                {"max_keys_per_operation": 3},
                {"max_known_objects": 3},
                {"min_prefetch_tokens": 8, "max_prefetch_tokens": 12},
            ]
        ),
        credits=st.integers(2, 9),
    )
    def start(self, pages, rows, budget, groups, images, host, writes, sharing, few, credits):
        cfg = config(
            storage=limits(max_host_blocks=credits, wait_timeout_us=6, ready_timeout_us=4, **few),
            groups=groups,
            num_pages=pages,
            max_rows=rows,
            max_scheduled_tokens=budget,
            num_host_pages=host,
            host_write_policy=writes,
            share_in_flight=sharing,
            num_snapshot_pages=images[0],
            max_retracted_requests=images[1],
        )
        self.stores = StorageRig(cfg=cfg), StorageRig(cfg=cfg)
        self.store = self.stores[0]
        self.names = iter(f"r{number}" for number in range(10**6))
        self.live: list[str] = []
        self.tick(0, True, True, 0)

    def both(self, what):
        return [what(store) for store in self.stores]

    # -- what clients and time do -----------------------------------------------------

    @rule(
        head=st.integers(0, 1),
        tokens=st.integers(5, 30),
        tail=st.integers(0, 4),
        cap=st.sampled_from([1 << 30] * 3 + [9]),
    )
    def submit(self, head, tokens, tail, cap):
        rid = next(self.names)
        ids = [head * 100 + at for at in range(tokens)] + [900 + tail] * (tail > 0)
        one, two = self.both(lambda s: s.rig.submit(rid, ids, max_cached_prefix_tokens=cap))
        assert one == two
        if one is None:
            self.live.append(rid)

    @rule(
        after=st.integers(0, 3),
        allowed=st.sampled_from([True, True, True, False]),
        forward=st.sampled_from([True, True, True, False]),
        queued=st.sampled_from([0, 0, 0, 0, 5, 11]),
    )
    def tick(self, after, allowed, forward, queued):
        pressure = StoragePressure(queued, 0, 0)
        self.both(lambda s: s.tick(after, storage=allowed, forward=forward, pressure=pressure))

    @rule(head=st.integers(0, 1), tokens=st.integers(9, 30), forget=st.booleans())
    def serve(self, head, tokens, forget):
        """A request that meets no trouble, and whose pages may be left in storage alone."""
        self.tick(0, True, True, 0)
        self.submit(head, tokens, 0, 1 << 30)
        for _ in range(5):
            self.plan()
            self.catch_up()
        if forget:
            self.forget_what_is_cached(everything=True)

    @rule(head=st.integers(0, 1), tokens=st.integers(9, 30), others=st.integers(0, 2))
    def have_it_fetched(self, head, tokens, others):
        """Prompts that are being read from storage."""
        self.serve(head, tokens, forget=True)
        for tail in range(others + 1):
            self.submit(head, tokens, tail, 1 << 30)
        self.plan()
        self.both(lambda s: [s.answer(op_id) for op_id in list(s.open)])
        self.plan()

    @rule()
    def plan(self):
        one, two = self.both(lambda s: s.plan())
        assert encode_plan(one) == encode_plan(two)
        for abort in one.aborts:
            self.live.remove(abort.rid)
        while self.store.rig.in_flight:
            self.both(lambda s: s.rig.commit())

    @rule(rounds=st.integers(1, 6))
    def run(self, rounds):
        for _ in range(rounds):
            self.plan()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), finish=st.booleans())
    def end(self, data, finish):
        rid = data.draw(st.sampled_from(self.live))
        state = self.store.scheduler._requests.get(rid).state
        event = (Finished if finish and state in MAY_FINISH else Aborted)(rid)
        self.live.remove(rid)
        self.both(lambda s: s.scheduler.advance([event]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def detach(self, data):
        rid = data.draw(st.sampled_from(self.live))
        self.both(lambda s: s.detach(rid))

    # -- what copies and storage do -----------------------------------------------------

    @precondition(lambda self: self.store.rig.unacknowledged)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def acknowledge(self, data, ok):
        which = data.draw(st.integers(0, len(self.store.rig.unacknowledged) - 1))
        self.both(lambda s: s.rig.acknowledge(which, ok=ok))

    @precondition(lambda self: self.store.open)
    @rule(data=st.data(), retired=st.sampled_from([True] * 7 + [False]), true=st.booleans())
    def answer(self, data, retired, true):
        op_id = data.draw(st.sampled_from(sorted(self.store.open)))
        op, success, failed = self.store.open[op_id], None, ()
        if not true:
            keys = [hasattr(op, "blocks") or key in self.store.objects for key in op.keys]
            success = [one and data.draw(st.booleans()) for one in keys]
            failed = tuple(not one for one in success) if data.draw(st.booleans()) else ()
        self.both(lambda s: s.answer(op_id, success, retired=retired, failed=failed))

    @precondition(lambda self: self.store.unretired)
    @rule()
    def retire(self):
        self.both(lambda s: s.retire(min(s.unretired)))

    @rule(fail=st.sampled_from([True, False, False, False]))
    def loads_fail_or_do_not(self, fail):
        for store in self.stores:
            store.rig.loads_fail = fail

    @rule()
    def catch_up(self):
        self.both(lambda s: s.catch_up())

    @rule(everything=st.booleans())
    def forget_what_is_cached(self, everything):
        for rid in list(self.live):
            if self.store.scheduler._requests.get(rid).state in MAY_FINISH:
                self.live.remove(rid)
                self.both(lambda s, rid=rid: s.rig.finish(rid))
        for _ in range(3):
            self.plan()
            self.catch_up()
        clear = "clear" if everything else "clear_l1"
        one, two = self.both(lambda s: getattr(s.scheduler, clear)())
        assert one == two

    @invariant()
    def everything_is_accounted_for(self):
        if hasattr(self, "store"):
            self.store.scheduler.check()

    def teardown(self):
        if not hasattr(self, "store"):
            return
        store, scheduler = self.store, self.store.scheduler
        for rid in self.live:
            store.rig.abort(rid)
        store.catch_up()
        for op_id in list(store.unretired):
            store.retire(op_id)
        stats = scheduler.storage_stats()
        assert (stats.operations, stats.held_blocks, stats.waiting_requests) == (0, 0, 0)
        assert store.rig.at_baseline()
        assert scheduler.clear()
        assert scheduler.empty_pages == store.rig.config.num_pages - 1
        assert scheduler._host.pool.empty == store.rig.config.num_host_pages - 1
        scheduler.check()


EXAMPLES = int(os.environ.get("DRUMLINE_SOAK_EXAMPLES", "20"))
TestAnyOrderOfStorage = StorageMachine.TestCase
TestAnyOrderOfStorage.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=20, deadline=None
)
