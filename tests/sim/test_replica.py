"""Several ranks of one replica: mirrored schedulers that meet in the relay."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.members import Members

from drumline.core.errors import InvariantError
from drumline.replay.simulator import Simulation


class Replica:
    """Ranks that run the same rounds, each with a plane of its own."""

    def __init__(self, size, depth=1):
        self.members = Members(size)
        self.sims = [Simulation(depth=depth, replica=seat) for seat in self.members.seats]
        self.owner = self.sims[0]

    def run(self, rounds):
        """Run rounds on every rank; returns each rank's error, or None."""
        return self.members.all([lambda sim=sim: sim.run(rounds) for sim in self.sims])


def plans(sim):
    return [record.digest for record in sim.loop.records.kept]


@given(seed=st.integers(0, 1 << 32), size=st.sampled_from((2, 3)), depth=st.sampled_from((0, 1)))
@settings(max_examples=8, deadline=None)
def test_every_member_runs_the_rounds_of_the_first(seed, size, depth):
    rng = random.Random(seed)
    replica = Replica(size, depth)
    owner = replica.owner
    for n in range(6):
        prompt = [rng.randrange(1, 512) for _ in range(rng.randint(1, 40))]
        owner.submit(f"r{n}", prompt, max_new_tokens=rng.randint(1, 9), seed=n)
        if rng.random() < 0.3:
            owner.abort(f"r{rng.randrange(n + 1)}")
        for sim in replica.sims[1:]:
            sim.clock.advance(rng.randrange(1_000_000))
        assert replica.run(rng.randint(1, 4)) == [None] * size
    assert replica.run(40) == [None] * size
    assert len(owner.frontend.over) == 6
    for sim in replica.sims:
        assert sim.loop.idle
        assert plans(sim) == plans(owner)
        sim.loop.check()
        assert not sim.plane.known


def test_a_member_whose_plane_samples_another_token_stops_all_before_the_next_plan():
    replica = Replica(2)
    replica.owner.submit("a", [1, 2, 3], max_new_tokens=20, ignore_eos=True)
    assert replica.run(4) == [None, None]
    plane = replica.sims[1].plane
    plane._last["a"] ^= 1
    errors = replica.run(4)
    said = {str(error) for error in errors}
    assert all(isinstance(error, InvariantError) for error in errors)
    assert len(said) == 1, "both members say the same"
    assert "rank 1 has results" in said.pop()


def test_only_the_first_members_stop_request_counts():
    replica = Replica(2)
    stops = threading.Event()

    def run(sim, asks):
        return sim.loop.round(asks and stops.is_set())

    first, second = replica.sims
    stops.set()
    assert replica.members.all([lambda: run(first, False), lambda: run(second, True)]) == [
        False,
        False,
    ]
    assert replica.members.all([lambda: run(first, True), lambda: run(second, False)]) == [
        True,
        True,
    ]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_flush_is_run_by_every_member_or_by_none(depth):
    replica = Replica(2, depth)
    replica.owner.submit("a", list(range(1, 30)), max_new_tokens=3, ignore_eos=True)
    assert replica.run(12) == [None, None]
    replica.owner.call(1, "flush_cache")
    assert replica.run(2) == [None, None]
    assert [reply.success for reply in replica.owner.frontend.replies] == [True]
    assert {sim.scheduler.empty_pages for sim in replica.sims} == {64}
