"""Engines of several ranks, by seed: whatever happens to them, they keep in step."""

import itertools
import os
import re
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.flipping import Flipping

from drumline.contract.layout import Layout
from drumline.core.errors import InvariantError
from drumline.replay.arithmetic import answer
from drumline.replay.fleet import Asked, Scenario, play, scenario, submitting
from drumline.replay.simulator import small_specs

SEEDS = int(os.environ.get("SEEDS", "1000"))
PARTS = max(8, SEEDS // 125)
"""So many that none takes as long as a test that hangs would."""


def check_answers(fleet):
    for asked in fleet.played.asked:
        told = fleet.owner(asked.engine).answer(asked.rid)
        ids = list(islice(answer(list(asked.prompt), asked.seed, 512), asked.limit))
        ids = ids[: ids.index(0) + 1] if 0 in ids else ids
        if told.finished == "abort":
            assert told.ids == ids[: len(told.ids)]
        else:
            assert told.ids == ids


def run(seed):
    fleet = play(scenario(seed), seed)
    fleet.check()
    check_answers(fleet)
    return fleet


@pytest.mark.parametrize("part", range(PARTS))
def test_ranks_keep_in_step_and_every_request_ends_once(part):
    for seed in range(part, SEEDS, PARTS):
        try:
            run(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@given(seed=st.integers(1 << 20, 1 << 40), order=st.integers(1, 1 << 20))
@settings(max_examples=20, deadline=None)
def test_the_order_in_which_ranks_go_on_changes_nothing(seed, order):
    first, second = (play(scenario(seed), seed, order=each) for each in (0, order))
    assert first.rounds == second.rounds
    for engine in range(first.played.layout.data):
        over, again = (fleet.owner(engine).frontend.over for fleet in (first, second))
        assert [(rid, told.ids) for rid, told in over] == [(rid, told.ids) for rid, told in again]


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(3, 1), Layout(2, 2)])
def test_a_flipped_row_is_reported_at_the_next_head_with_round_rank_and_field(layout):
    asked = tuple(
        Asked(engine=engine, rid=f"r{engine}", prompt=(1, 2, 3), limit=30, seed=1)
        for engine in range(layout.data)
    )
    acts = {(one.engine, 0): [submitting(one)] for one in asked}
    # The plane of the rank that goes astray is too slow to run the wrong plan in that round.
    lags = (1 << 20,) * layout.size
    played = Scenario(layout, 1, small_specs(), lags, asked, acts)
    astray = layout.size - 1
    loops = {}

    def plant(rank, sim):
        loops[rank] = sim.loop
        sim.plane._lag = lambda: 1 << 20
        if rank == astray:
            sim.loop._scheduler = Flipping(sim.scheduler, lambda plan: plan.round == 7)

    with pytest.raises(InvariantError) as caught:
        play(played, 1, plant)
    told = re.search(
        r"in round (\d+), rank (\d+) has (\w+) 0x\w+ where rank (\d+) has 0x\w+", str(caught.value)
    )
    first = layout.replica(astray)[0]
    assert told.groups() == ("7", str(astray), "rows", str(first))
    for rank in layout.replica(astray):
        assert loops[rank].records.kept[-1].digest.round == 7, "no further plan was made"


def test_a_replica_with_something_to_do_is_not_kept_waiting_by_an_idle_one():
    asked = (Asked(engine=0, rid="r", prompt=(1, 2, 3), limit=12, seed=1),)
    played = Scenario(
        Layout(1, 2), 0, small_specs(), (0, 0), asked, {(0, 0): [submitting(asked[0])]}
    )
    fleet = play(played, 1)
    fleet.check()
    idle = fleet.sims[1]
    busy_rounds = [tokens for _, tokens in fleet.forwards[1]]
    assert busy_rounds == [(3, 0)] + [(1, 0)] * 11
    waits = [
        later.now_us - earlier.now_us > 5_000
        for earlier, later in zip(
            idle.loop.records.kept, list(idle.loop.records.kept)[1:], strict=False
        )
    ]
    # It waits before the first forward and after the last, and in no round between.
    assert waits[1:12] == [False] * 11
    assert all(waits[14:])


@pytest.mark.parametrize(
    ("specs", "suspends_every", "limit"),
    [
        (small_specs(num_snapshot_pages=33, max_retracted_requests=4), 3, 12),
        (small_specs(num_host_pages=33), 0, 1),
    ],
    ids=["a request that is brought back", "a store of one that is over"],
)
def test_a_replica_that_waits_for_a_copy_is_not_kept_waiting_by_an_idle_one(
    specs, suspends_every, limit
):
    asked = (Asked(engine=0, rid="r", prompt=tuple(range(1, 25)), limit=limit, seed=1),)
    # Nobody is told to stop before the last copy is done.
    acts = {(0, 0): [submitting(asked[0])], (1, 60): []}
    played = Scenario(Layout(1, 2), 0, specs, (0, 0), asked, acts, suspends_every)
    copying, starts = [], []

    def plant(rank, sim):
        sim.plane._tiers._delay = lambda _op: 6
        run_round = sim.loop.round

        def noted(stop):
            stopped = run_round(stop)
            if rank == 0:
                copying.append(bool(sim.loop._cache_ops.open))
            else:
                starts.append(sim.loop._now_us)
            return stopped

        sim.loop.round = noted

    fleet = play(played, 1, plant)
    fleet.check()
    forwards = {round_ for round_, _ in fleet.forwards[0]}
    waited = [b - a > 5_000 for a, b in itertools.pairwise(starts)]
    silent = [at for at, open_ in enumerate(copying[:-1]) if open_ and at not in forwards]
    assert len(silent) > 3, "rounds without a forward in which a copy is waited for"
    assert not any(waited[at] for at in silent)
    assert all(waited[-4:]), "and nobody hurries once all is over"
