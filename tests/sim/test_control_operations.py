"""Control operations that reach the engines of a group in different rounds, or in another order."""

from itertools import islice, pairwise

import pytest
from operated import PROMPT, SPECS, engines, long_requests, on_each, said

from drumline.contract.layout import Layout
from drumline.core.errors import InvariantError
from drumline.replay.arithmetic import answer
from drumline.replay.fleet import play
from drumline.replay.simulator import Simulation, small_specs

LAYOUTS = [Layout(1, 2), Layout(1, 3), Layout(2, 2)]
LIMIT = 40
PAUSE, RESUME, FLUSH = "pause_scheduler", "resume_scheduler", "flush_cache"
PROFILE, SET = ("start_profile", {"profile_id": "p"}), ("set_internal_state", {"mixed_batch": True})


def prompt(engine):
    return (*PROMPT, engine)


def operated(layout, calls):
    """Return a scenario: a long request on each engine; calls are (round, engine, method, …)."""
    return engines(layout, long_requests(LIMIT), on_each(calls))


def answers_are_whole(fleet):
    for engine in range(fleet.played.layout.data):
        ids = list(islice(answer(list(prompt(engine)), 1, 512), LIMIT))
        ids = ids[: ids.index(511) + 1] if 511 in ids else ids
        assert fleet.owner(engine).answer(f"r{engine}").ids == ids


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_what_was_withheld_goes_first_on_resume_and_what_left_meanwhile_not_at_all(mode):
    sim = Simulation(small_specs(max_rows=1, eos_token_ids=(511,)), depth=1)
    sim.call(1, PAUSE, mode)
    for rid in ("first", "left", "second"):
        sim.submit(rid, PROMPT, max_new_tokens=3, ignore_eos=True)
        sim.run(1)
    sim.abort("left")
    sim.run(1)
    sim.submit("beside", PROMPT, max_new_tokens=3, ignore_eos=True)
    sim.call(2, RESUME)
    sim.submit("behind", PROMPT, max_new_tokens=3, ignore_eos=True)
    sim.run_until_idle()
    assert said(sim) == {1: (True, ""), 2: (True, "")}
    order = [rid for rid, _ in sim.frontend.over]
    assert order == ["left", "first", "second", "beside", "behind"]
    assert sim.answer("left").ids == []
    sim.check_drained()


def test_a_frozen_engine_lets_its_copies_land():
    sim = Simulation(small_specs(num_host_pages=33), delay=lambda _op: 12)
    sim.submit("r", PROMPT, max_new_tokens=3)
    sim.run(6)
    assert sim.loop._cache_ops.open
    sim.call(1, PAUSE, "keep")
    sim.run(20)
    assert not sim.loop._cache_ops.open
    sim.call(2, FLUSH)
    sim.run(1)
    assert said(sim) == {1: (True, ""), 2: (True, "")}


def test_a_flush_behind_a_pause_is_done_whoever_waits():
    sim = Simulation(small_specs(eos_token_ids=(511,)), depth=1)
    sim.submit("before", PROMPT, max_new_tokens=3)
    sim.run(2)
    sim.call(1, PAUSE, "wait")
    for n in range(50):
        sim.submit(f"r{n}", PROMPT, max_new_tokens=2)
    sim.run(12)
    sim.call(2, FLUSH)
    sim.call(3, RESUME)
    sim.run_until_idle()
    assert said(sim) == {1: (True, ""), 2: (True, ""), 3: (True, "")}
    assert sim.answer("r0").cached_tokens == 0, "it was forgotten"
    assert all(len(sim.answer(f"r{n}").ids) == 2 for n in range(50))
    sim.check_drained()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", range(2))
def test_engines_that_hear_of_operations_in_another_order_all_stop_with_one_message(layout, order):
    calls = [
        (at, engine, *operation)
        for engine in range(layout.data)
        for at, operation in zip(
            (5 + engine, 9 + engine), (SET, PROFILE) if engine else (PROFILE, SET), strict=True
        )
    ]
    errors, last = {}, {}

    def plant(rank, sim):
        round_ = sim.loop.round

        def watched(stop):
            try:
                return round_(stop)
            except Exception as error:
                errors[rank], last[rank] = str(error).split(";")[0], sim.loop._relay.round
                raise

        sim.loop.round = watched

    with pytest.raises(InvariantError, match="different operations") as caught:
        play(operated(layout, calls), 1, plant, order=order)
    assert sorted(errors) == list(range(layout.size))
    told = "the data-parallel ranks hold different operations at the head of their queues: "
    # A member may hear of it from the one beside it, which says whose words they are.
    told += "start_profile and set_internal_state"
    assert all(error.endswith(told) for error in errors.values())
    assert len(set(last.values())) == 1, "in one round"
    assert "in one order" in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_that_are_paused_in_different_rounds_keep_what_they_have(layout):
    calls = [(6 + 4 * engine, engine, PAUSE, "keep") for engine in range(layout.data)]
    calls += [(40 - 3 * engine, engine, RESUME) for engine in range(layout.data)]
    fleet = play(operated(layout, calls), 1)
    fleet.check()
    assert all(success for engine in range(layout.data)
               for success, _ in said(fleet.owner(engine)).values())  # fmt: skip
    for rank in range(layout.size):
        # While all are paused nothing runs, not even for company.
        rounds = [round_ for round_, _ in fleet.forwards[rank]]
        gap = max(later - earlier for earlier, later in pairwise(rounds))
        assert gap >= 40 - 3 * (layout.data - 1) - (6 + 4 * (layout.data - 1))
    answers_are_whole(fleet)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_resume_that_comes_before_the_drain_ended_calls_it_off_where_it_comes(layout, mode):
    calls = [(6 + 2 * engine, engine, PAUSE, mode) for engine in range(layout.data)]
    # The same round for the first engine, some rounds later for the others.
    calls += [(6 + 5 * engine, engine, RESUME) for engine in range(layout.data)]
    fleet = play(operated(layout, calls), 1)
    fleet.check()
    for engine in range(layout.data):
        paused, resumed = said(fleet.owner(engine)).values()
        assert resumed == (True, "")
        if mode == "wait":
            assert paused == (False, "resumed before the pause drained")
            continue
        told = fleet.owner(engine).answer(f"r{engine}")
        assert told.finished == "abort"
        assert told.details["message"] == "the engine was paused, which ended what ran"
    if mode == "wait":
        answers_are_whole(fleet)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flush_that_one_engine_cannot_do_is_done_by_none_and_says_so_once_to_each(layout):
    calls = [(6 + 3 * engine, engine, FLUSH) for engine in range(layout.data)]
    fleet = play(operated(layout, calls), 1)
    fleet.check()
    refusal = (False, "the cache is in use; retry once the running requests ended")
    for engine in range(layout.data):
        assert list(said(fleet.owner(engine)).values()) == [refusal]
    answers_are_whole(fleet)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("waiting", [1, 24])
def test_a_keep_pause_under_load_is_answered_within_two_rounds(depth, waiting):
    sim = Simulation(small_specs(num_pages=257, eos_token_ids=(511,)), depth=depth, lag=lambda: 3)
    for n in range(waiting):
        sim.submit(f"r{n}", (*range(1, 90), n), max_new_tokens=10)
    sim.run(9)
    sim.call(1, PAUSE, "keep")
    sim.run(2)
    assert said(sim) == {1: (True, "")}
    assert not sim.loop._forwards
    sim.call(2, RESUME)
    sim.run_until_idle()
    sim.check_drained()


def test_a_frozen_engine_with_nothing_open_waits_for_messages_and_does_nothing_else():
    sim = Simulation(SPECS, depth=1)
    sim.submit("r", prompt(0), max_new_tokens=LIMIT)
    sim.run(6)
    sim.call(1, PAUSE, "keep")
    sim.run(2)
    assert sim.loop.idle
    executed = []
    sim.plane.execute = lambda *args: executed.append(args)
    before = sim.clock.now_us()
    sim.run(10)
    assert not executed
    assert sim.clock.now_us() - before >= 10 * 10_000, "each waited for a message"
