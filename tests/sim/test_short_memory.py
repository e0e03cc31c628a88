"""An engine with too little memory serves everything, computes nothing twice and says the same."""

import random
import re
from itertools import islice

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.collective.in_process import run_ranks
from drumline.contract.census import CacheState
from drumline.replay.arithmetic import answer
from drumline.replay.simulator import Simulation, small_specs

VOCAB = 512
DEPTHS = (0, 1)


PROMPT = 30
CONTEXT = 128


def specs(num_pages=41, *, images=300, slots=8):
    """A device for a bit more than one request's context a row would need; no end of sequence."""
    return small_specs(
        num_pages=num_pages,
        max_rows=8,
        max_model_len=CONTEXT,
        num_snapshot_pages=images + 1 if slots and images else 1,
        max_retracted_requests=slots if images else 0,
        eos_token_ids=(),
    )


class Engine:
    """A simulated rank that counts what its forwards feed."""

    def __init__(self, specs, **fields):
        self.sim = Simulation(specs, **fields)
        self.prompts = {}
        self.fed = 0
        execute = self.sim.plane.execute

        def counting(plan, dispatch):
            self.fed += plan.batch.tokens if plan.batch else 0
            return execute(plan, dispatch)

        self.sim.plane.execute = counting

    def ask(self, count, seed=0):
        """Submit requests that name no length, so that nothing is reserved for their answers."""
        rng = random.Random(seed)
        for n in range(count):
            self.prompts[f"r{n}"] = [rng.randrange(1, VOCAB) for _ in range(PROMPT)]
            self.sim.submit(f"r{n}", self.prompts[f"r{n}"], seed=n)

    def expected(self, rid):
        whole = answer(self.prompts[rid], int(rid[1:]), VOCAB)
        return list(islice(whole, CONTEXT - PROMPT))

    @property
    def counters(self):
        return self.sim.loop._cache_ops.counters

    def check_fed_once(self, depth):
        """Each prompt once, and each token of an answer but its last, which nobody feeds.

        With one forward ahead, an end may be seen a token late.
        """
        count = len(self.prompts)
        assert 0 <= self.fed - count * (CONTEXT - 1) <= count * depth

    def check_drained(self):
        self.sim.check_drained()
        scheduler = self.sim.scheduler
        assert scheduler.sizes().retracted == 0
        assert len(scheduler._retraction) == 0
        snapshots = scheduler._retraction._snapshots
        assert snapshots.pool.empty == self.sim.specs.num_snapshot_pages - 1
        assert len(snapshots.slots) == self.sim.specs.max_retracted_requests


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("delay", [0, 3])
def test_a_pool_of_a_third_the_size_gives_every_answer_and_computes_nothing_twice(depth, delay):
    engine = Engine(specs(num_pages=86), depth=depth, delay=lambda op: delay)
    engine.ask(16)
    engine.sim.run_until_idle(6000)
    for rid in engine.prompts:
        told = engine.sim.answer(rid)
        assert (told.ids, told.finished) == (engine.expected(rid), "length"), rid
    engine.check_fed_once(depth)
    assert engine.counters.retractions >= 4
    assert engine.counters.restores == engine.counters.retractions
    tier = engine.counters.snapshot
    # What is still cached on the device is not copied back.
    assert tier.stored_blocks >= tier.loaded_blocks > 0
    engine.check_drained()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("interval", range(1, 8))
def test_forced_retraction_every_so_many_plans_changes_no_answer(interval, depth):
    engine = Engine(
        specs(num_pages=300), depth=depth, force_retraction_interval=interval, delay=lambda op: 1
    )
    engine.ask(5, seed=interval)
    engine.sim.run_until_idle(20_000)
    for rid in engine.prompts:
        told = engine.sim.answer(rid)
        assert told.ids == engine.expected(rid)
        assert 0 <= told.cached_tokens <= PROMPT, "nothing is counted again that comes back"
    assert engine.counters.retractions > 10
    engine.check_fed_once(depth)
    engine.check_drained()


@given(
    seed=st.integers(0, 1 << 32),
    depth=st.sampled_from(DEPTHS),
    num_pages=st.sampled_from((45, 60, 86)),
    images=st.sampled_from((0, 20, 40, 300)),
    slots=st.sampled_from((0, 1, 2, 8)),
    interval=st.sampled_from((0, 0, 3)),
)
@settings(max_examples=25)
def test_aborts_at_any_time_and_pools_of_any_size_leave_everything_as_it_was(
    seed, depth, num_pages, images, slots, interval
):
    rng = random.Random(seed)
    pools = specs(num_pages, images=images, slots=slots)
    engine = Engine(
        pools,
        depth=depth,
        lag=lambda: rng.randint(0, 3),
        delay=lambda op: rng.randint(0, 6),
        force_retraction_interval=interval if pools.max_retracted_requests else 0,
    )
    engine.ask(8, seed)
    for _ in range(10):
        engine.sim.run(rng.randint(1, 30))
        if rng.random() < 0.5:
            engine.sim.abort(f"r{rng.randrange(8)}")
        engine.sim.loop.check()
    engine.sim.run_until_idle(20_000)
    ends = set()
    for rid in engine.prompts:
        told = engine.sim.answer(rid)
        whole = engine.expected(rid)
        ends.add(told.finished)
        if told.finished == "abort":
            assert told.ids == whole[: len(told.ids)]
        else:
            assert told.ids == whole
    engine.check_drained()


@pytest.mark.parametrize(("images", "slots"), [(0, 0), (300, 0), (0, 8), (20, 8), (300, 1)])
@pytest.mark.parametrize("depth", DEPTHS)
def test_without_a_place_for_an_image_the_newest_is_told_why_it_ends(images, slots, depth):
    engine = Engine(specs(num_pages=45, images=images, slots=slots), depth=depth)
    engine.ask(8)
    engine.sim.run_until_idle(6000)
    ends = {rid: engine.sim.answer(rid) for rid in engine.prompts}
    aborted = [rid for rid, told in ends.items() if told.finished == "abort"]
    whole = [rid for rid, told in ends.items() if told.finished == "length"]
    assert "r0" in whole
    assert aborted
    for rid in aborted:
        details = ends[rid].details
        assert details["status_code"] == 503
        reason = "image_does_not_fit" if images and slots else "out_of_pages"
        assert details["message"].startswith(reason), details
    for rid in whole:
        assert ends[rid].ids == engine.expected(rid)
    engine.check_drained()


@given(
    delays=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=2, max_size=3),
    depth=st.sampled_from(DEPTHS),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=5)
def test_members_whose_images_land_apart_suspend_and_restore_alike(delays, depth, seed):
    size = len(delays)

    def main(mesh):
        mine = delays[mesh.index]
        engine = Engine(
            specs(num_pages=60),
            depth=depth,
            replica=mesh.group(range(size), "replica"),
            delay=lambda op: mine[op.op_id % 4],
        )
        engine.ask(6, seed)
        engine.sim.run(700)
        assert engine.sim.loop.idle
        assert engine.sim.plane.known == 0
        engine.sim.loop.check()
        told = [engine.sim.answer(rid).ids for rid in engine.prompts] if not mesh.index else None
        return engine.counters, engine.fed, told, [engine.expected(rid) for rid in engine.prompts]

    results = run_ranks(size, main, seed)
    counters, fed, told, expected = results[0]
    assert told == expected
    assert counters.retractions > 0
    assert all((theirs, tokens) == (counters, fed) for theirs, tokens, *_ in results)


def test_a_request_that_is_suspended_counts_as_waiting_and_is_not_idle():
    engine = Engine(specs(num_pages=300), force_retraction_interval=5, delay=lambda op: 8)
    engine.ask(1)
    engine.sim.run(7)
    assert engine.sim.scheduler.sizes().retracted == 1
    assert not engine.sim.loop.idle
    engine.sim.call(1, "pause_scheduler", "wait")
    engine.sim.run(12)
    assert engine.sim.frontend.replies == [], "a drain waits for it"
    engine.sim.run_until_idle(6000)
    assert [reply.success for reply in engine.sim.frontend.replies] == [True]
    assert engine.sim.answer("r0").ids == engine.expected("r0")


def test_the_line_of_a_request_says_how_often_and_how_long_it_was_suspended(caplog):
    caplog.set_level("INFO", "drumline.request")
    engine = Engine(specs(num_pages=300), force_retraction_interval=9, delay=lambda op: 6)
    engine.ask(2)
    engine.sim.run_until_idle(6000)
    lines = [text for text in caplog.messages if text.startswith("Req: ")]
    said = [re.search(r"preempt_ms=([0-9.]+), preempt_count=(\d+),", line) for line in lines]
    assert len(said) == 2
    assert sum(int(found[2]) for found in said) == engine.counters.retractions > 4
    for found in said:
        # A round is a millisecond, and no image is back sooner than its store lands.
        assert float(found[1]) >= 6 * int(found[2])


def test_a_request_that_ends_while_suspended_was_suspended_until_then(caplog):
    caplog.set_level("INFO", "drumline.request")
    engine = Engine(specs(num_pages=300), force_retraction_interval=5, delay=lambda op: 500)
    engine.ask(1)
    engine.sim.run(40)
    engine.sim.abort("r0")
    engine.sim.run(1)
    (line,) = [text for text in caplog.messages if text.startswith("Req: r0 ")]
    found = re.search(r"preempt_ms=([0-9.]+), preempt_count=1,", line)
    assert 25 <= float(found[1]) <= 40


def test_a_census_counts_what_blocks_say_so_that_a_lost_page_shows():
    engine = Engine(specs(num_pages=300))
    engine.ask(4)
    engine.sim.run(20)
    scheduler = engine.sim.scheduler
    census = scheduler.census()
    assert census.device.active == scheduler.active_pages() > 0
    assert (census.device.lost, census.snapshot.lost) == (0, 0)
    scheduler._pool._parents.free.take(3)
    assert scheduler.census().device.lost == 3


def test_the_cache_state_accounts_for_every_page_while_requests_are_suspended():
    engine = Engine(specs(num_pages=60), delay=lambda op: 4)
    engine.ask(6)
    seen = set()
    for call in range(120):
        engine.sim.call(call, "cache_state")
        engine.sim.run(3)
        reply = engine.sim.frontend.replies[-1]
        assert (reply.call_id, reply.success) == (call, True)
        state = msgspec.json.decode(reply.message, type=CacheState)
        pools = state.pools
        assert (pools.device.pages, pools.host.pages, pools.snapshot.pages) == (59, 0, 300)
        assert pools.device.lost == pools.host.lost == pools.snapshot.lost == 0
        counters = state.counters
        # An image stands in the snapshot pool until its restore is done.
        assert state.suspended_requests >= counters.retractions - counters.restores
        assert (pools.snapshot.active > 0) >= (state.suspended_requests > 0)
        seen.add(state.suspended_requests)
    assert max(seen) > 0
    engine.sim.run_until_idle(6000)
    engine.check_drained()
