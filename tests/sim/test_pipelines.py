"""Replicas of several stages: they plan alike, the last one's results are everybody's."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.contract.layout import Layout
from drumline.core.errors import InvariantError
from drumline.replay.arithmetic import answer
from drumline.replay.fleet import Asked, Scenario, aborting, play, submitting
from drumline.replay.simulator import small_specs

LAYOUTS = [Layout(1, 1, 2), Layout(1, 1, 3), Layout(2, 1, 2), Layout(1, 2, 2)]
SPECS = small_specs(eos_token_ids=(511,))


def expected(asked):
    ids = list(islice(answer(list(asked.prompt), asked.seed, 512), asked.limit))
    return ids[: ids.index(511) + 1] if 511 in ids else ids


def asking(layout, depth, asked, acts=None, specs=SPECS, lags=None):
    acts = acts or {}
    for one in asked:
        acts.setdefault((one.engine, 0), []).append(submitting(one))
    return Scenario(layout, depth, specs, lags or (0,) * layout.size, tuple(asked), acts)


def some(layout, count=6, limit=9):
    return [
        Asked(
            n % layout.data, f"r{n}", tuple((7 * n + at) % 500 for at in range(1 + 9 * n)), limit, n
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_do_not_depend_on_stages_or_depth(layout):
    for depth in range(5):
        asked = some(layout)
        fleet = play(asking(layout, depth, asked), depth)
        fleet.check()
        for one in asked:
            assert fleet.owner(one.engine).answer(one.rid).ids == expected(one)


@given(
    layout=st.sampled_from(LAYOUTS),
    depth=st.integers(0, 4),
    arrivals=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 50), st.integers(1, 9), st.integers(-1, 12)),
        min_size=1,
        max_size=6,
    ),
    slow=st.sets(st.integers(0, 5)),
    specs=st.sampled_from(
        [
            SPECS,
            small_specs(num_pages=17, max_rows=3, eos_token_ids=(511,)),
            small_specs(num_pages=17, num_host_pages=33, max_scheduled_tokens=8),
            small_specs(num_pages=17, num_snapshot_pages=33, max_retracted_requests=3),
        ]
    ),
    order=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_every_request_ends_once_whoever_is_late(layout, depth, arrivals, slow, specs, order):
    asked, acts = [], {}
    for n, (when, length, limit, left) in enumerate(arrivals):
        prompt = tuple((3 * n + at) % 500 + 1 for at in range(length))
        one = Asked(n % layout.data, f"r{n}", prompt, limit, n)
        asked.append(one)
        acts.setdefault((one.engine, when), []).append(submitting(one))
        if left >= 0:
            acts.setdefault((one.engine, when + left), []).append(aborting(one.rid))
    lags = tuple((1 << 20) * (rank in slow) for rank in range(layout.size))
    played = Scenario(layout, depth, specs, lags, tuple(asked), acts)
    fleet = play(played, order, order=order)
    fleet.check()
    eos = specs.model.eos_token_ids[0]
    for one in asked:
        told = fleet.owner(one.engine).answer(one.rid)
        ids = list(islice(answer(list(one.prompt), one.seed, 512), one.limit))
        ids = ids[: ids.index(eos) + 1] if eos in ids else ids
        assert told.ids == (ids if told.finished != "abort" else ids[: len(told.ids)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_whose_numbers_broke_on_the_last_stage_ends_on_all(layout):
    def plant(rank, sim):
        if layout.stage_index(rank) == layout.pipeline - 1:
            sim.plane._faulty = frozenset({"r1"})

    asked = some(layout, 4)
    fleet = play(asking(layout, layout.pipeline, asked), 1, plant)
    fleet.check()
    assert fleet.owner(asked[1].engine).answer("r1").finished == "abort"
    for one in (asked[0], *asked[2:]):
        assert fleet.owner(one.engine).answer(one.rid).ids == expected(one)


def test_a_stage_that_keeps_its_own_results_is_named_at_the_next_head():
    layout = Layout(1, 1, 2)

    def plant(rank, sim):
        if rank == 0:
            forwards, adopted = sim.loop._forwards, sim.loop._forwards._adopted

            def own(result):
                adopted(result)
                return result

            forwards._adopted = own

    with pytest.raises(InvariantError, match="rank 1 has results"):
        play(asking(layout, 2, some(layout, 1)), 1, plant)


def test_a_decode_that_runs_ahead_of_its_token_is_an_error():
    # What the scheduler keeps out of plans: the rule that all of this rests on.
    layout = Layout(1, 1, 2)

    def plant(rank, sim):
        sim.scheduler._decoding._stages = 1

    with pytest.raises(InvariantError, match="is fed"):
        play(asking(layout, 2, some(layout, 1)), 1, plant)
