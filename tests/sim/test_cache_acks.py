"""Copies land when they land; what schedulers hear of them is the same in every rank's round."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from drumline.collective.in_process import run_ranks
from drumline.contract.cache import BlockMoves, CacheAck, WriteBack
from drumline.core.errors import InvariantError
from drumline.replay.simulator import Simulation, small_specs

SPECS = small_specs(num_host_pages=65)


class Storing:
    """A scheduler some of whose plans also store pages; it keeps what the round's head hears."""

    def __init__(self, scheduler, rounds):
        self._scheduler, self._rounds = scheduler, rounds
        self.planned = {}
        self.heard = []
        self.round = 0

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def advance_head(self, events):
        self.heard += [(self.round + 1, event) for event in events if isinstance(event, CacheAck)]
        rest = [event for event in events if not isinstance(event, CacheAck)]
        if rest:
            self._scheduler.advance_head(rest)

    def plan(self):
        self.round += 1
        plan = self._scheduler.plan()
        ops = []
        for _ in range(self._rounds.count(self.round)):
            op_id = len(self.planned)
            blocks = np.array([op_id + 1], np.int32)
            ops.append(WriteBack(op_id, (BlockMoves(0, blocks, blocks),), pinned=True))
            self.planned[op_id] = self.round
        return replace(plan, cache_ops=tuple(ops)) if ops else plan


def storing(rounds, **fields):
    """Return a simulated rank whose plans of `rounds` store a page, and its scheduler."""
    # The scheduler is to store nothing of its own.
    sim = Simulation(SPECS, prefix_caching=False, **fields)
    scheduler = sim.loop._scheduler = Storing(sim.scheduler, rounds)
    return sim, scheduler


@given(
    rounds=st.lists(st.integers(1, 25), min_size=1, max_size=6),
    delays=st.lists(st.lists(st.integers(0, 12), min_size=6, max_size=6), min_size=1, max_size=3),
    failures=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=3),
    depth=st.sampled_from((0, 1)),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=25, deadline=None)
def test_members_whose_copies_land_in_different_rounds_advance_alike(
    rounds, delays, failures, depth, seed
):
    size = len(delays)
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 512) for _ in range(rng.randint(1, 30))] for _ in range(4)]

    def main(mesh):
        mine = mesh.index
        sim, scheduler = storing(
            rounds,
            depth=depth,
            replica=mesh.group(range(size), "replica"),
            delay=lambda op: delays[mine][op.op_id],
            failing=lambda op: (mine, op.op_id) in failures,
        )
        for n, prompt in enumerate(prompts):
            sim.submit(f"r{n}", prompt, max_new_tokens=5, seed=n)
            sim.run(5)
        sim.run(25)
        assert sim.loop.idle
        return scheduler.planned, scheduler.heard, sim.loop._cache_ops.counters

    results = run_ranks(size, main, seed)
    planned, heard, _counters = results[0]
    assert results == [results[0]] * size
    # An operation of round n is first polled in round n + 1.
    slowest = {
        op: planned[op] + 1 + max(member[op] for member in delays) for op in range(len(rounds))
    }
    bad = {op for member, op in failures if member < size}
    assert {ack.op_id: when for when, ack in heard} == slowest
    assert all(ack.ok is (ack.op_id not in bad) for _, ack in heard)
    assert heard == sorted(heard, key=lambda entry: (entry[0], entry[1].op_id))


def test_an_engine_with_an_open_copy_is_not_idle_and_hears_of_it_before_it_plans():
    sim, scheduler = storing([1], delay=lambda op: 3)
    for now in range(1, 5):
        sim.run(1)
        assert not sim.loop.idle
        assert scheduler.heard == []
        assert scheduler.round == now
    sim.run(1)
    assert scheduler.heard == [(5, CacheAck(0))]
    assert sim.loop.idle


def test_a_plane_that_is_behind_still_ends_what_it_was_given():
    sim, scheduler = storing([2, 2], lag=lambda: 3)
    sim.run(1)
    sim.run_until_idle(20)
    assert {ack.op_id for _, ack in scheduler.heard} == {0, 1}


def test_frozen_rounds_hear_of_copies_too():
    sim, scheduler = storing([4], delay=lambda op: 5)
    sim.submit("a", [1, 2, 3], max_new_tokens=20, ignore_eos=True)
    sim.run(3)
    sim.call(1, "pause_scheduler", "keep")
    sim.run(3)
    assert not sim.loop.idle, "a copy is open"
    sim.run(5)
    assert [ack for _, ack in scheduler.heard] == [CacheAck(0)]
    assert sim.loop.idle, "frozen, with nothing in flight"


def test_an_acknowledgment_of_nothing_stops_the_rank():
    sim, _scheduler = storing([1], delay=lambda op: 9)
    sim.run(1)
    sim.plane._tiers.poll = lambda: [CacheAck(7)]
    with pytest.raises(InvariantError, match="cache operation 7 is acknowledged and not open"):
        sim.run(1)


def test_a_steady_round_without_open_copies_polls_nothing():
    sim, _scheduler = storing([2])
    polls = []
    poll = sim.plane.poll_cache_acks
    sim.plane.poll_cache_acks = lambda: polls.append(1) or poll()
    sim.submit("a", [1, 2, 3], max_new_tokens=30, ignore_eos=True)
    sim.run(20)
    assert len(polls) == 1
