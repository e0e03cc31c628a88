"""Releasing memory and waking up, on engines of one rank and of several."""

from itertools import islice

import pytest
from operated import PROMPT, SPECS, engines, long_requests, on_each, said

from drumline.contract.layout import Layout
from drumline.replay.arithmetic import answer
from drumline.replay.fleet import Asked, Scenario, play, submitting
from drumline.replay.simulator import Simulation, small_specs

PAUSE, RESUME = "pause_scheduler", "resume_scheduler"
RELEASE, WAKE = "release_memory_occupation", "resume_memory_occupation"
LOAD = "update_weight_from_disk"


def expected(prompt, limit, seed=0):
    ids = list(islice(answer(list(prompt), seed, 512), limit))
    return ids[: ids.index(511) + 1] if 511 in ids else ids


def test_a_release_lets_what_runs_finish_and_withholds_what_arrives_until_the_wake():
    sim = Simulation(SPECS, depth=1)
    sim.submit("runs", PROMPT, max_new_tokens=8)
    sim.run(3)
    sim.call(1, RELEASE, None)
    sim.submit("waits", PROMPT, max_new_tokens=5)
    sim.submit("leaves", PROMPT, max_new_tokens=5)
    sim.run(30)
    assert said(sim) == {1: (True, "")}
    assert sim.answer("runs").ids == expected(PROMPT, 8)
    assert sorted(sim.frontend.live) == ["leaves", "waits"]
    assert sim.plane.gone == {"weights", "kv_cache"}
    sim.abort("leaves")
    sim.call(2, RESUME)
    sim.call(3, PAUSE, "wait")
    sim.call(4, "is_sleeping")
    sim.run(2)
    assert said(sim)[2] == (
        False,
        "memory is released (weights, kv_cache); call resume_memory_occupation first",
    )
    assert said(sim)[3] == (False, "memory is released (weights, kv_cache), so nothing runs")
    assert said(sim)[4] == (True, "true")
    sim.call(5, WAKE)
    sim.submit("later", (5, 6), max_new_tokens=1)
    sim.run_until_idle()
    assert said(sim)[5] == (True, "")
    assert sim.answer("waits").ids == expected(PROMPT, 5)
    assert sim.answer("waits").cached_tokens == 0, "its prefix went with the pages"
    assert sim.answer("leaves").finished == "abort"
    assert sim.answer("leaves").ids == []
    order = [rid for rid, _ in sim.frontend.over]
    assert order.index("runs") < order.index("leaves") < order.index("waits")
    sim.check_drained()


def test_prefixes_outlive_a_release_of_the_weights_alone():
    sim = Simulation(SPECS)
    sim.submit("first", PROMPT, max_new_tokens=2)
    sim.call(1, RELEASE, ["weights"])
    sim.run(10)
    sim.call(2, WAKE, ["weights"])
    sim.submit("second", PROMPT, max_new_tokens=2)
    sim.run_until_idle()
    assert said(sim) == {1: (True, ""), 2: (True, "")}
    assert sim.answer("second").cached_tokens == 16
    assert sim.answer("second").ids == sim.answer("first").ids


def test_one_region_after_the_other_and_back_in_parts():
    sim = Simulation(SPECS)
    for call, (method, tags) in enumerate(
        [
            (RELEASE, ["weights"]),
            (RELEASE, ["weights"]),
            (RELEASE, ["kv_cache"]),
            (WAKE, ["weights"]),
            (WAKE, ["weights"]),
            (WAKE, None),
        ]
    ):
        sim.call(call, method, tags)
        sim.run(2)
    assert said(sim) == {
        0: (True, ""),
        1: (False, "already released: weights"),
        2: (True, ""),
        3: (True, ""),
        4: (False, "not released: weights"),
        5: (True, ""),
    }
    sim.submit("r", PROMPT, max_new_tokens=2)
    sim.run_until_idle()
    assert sim.answer("r").ids == expected(PROMPT, 2)


def test_a_release_waits_for_copies_that_hold_pages():
    sim = Simulation(small_specs(num_host_pages=33), delay=lambda _op: 12)
    sim.submit("r", PROMPT, max_new_tokens=3)
    sim.call(1, RELEASE, ["kv_cache"])
    sim.run(6)
    assert not sim.frontend.live
    assert said(sim) == {}, "a page is still being copied to the host tier"
    sim.run(20)
    assert said(sim) == {1: (True, "")}


def test_weights_that_are_dropped_have_requests_refused_until_all_of_others_are_there():
    sim = Simulation(SPECS, depth=1)
    sim.submit("runs", PROMPT, max_new_tokens=8)
    sim.run(3)
    sim.call(1, RELEASE, None, True)
    sim.submit("waits", PROMPT, max_new_tokens=5)
    sim.run(30)
    assert sim.answer("runs").ids == expected(PROMPT, 8), "it finished with the weights"
    assert said(sim) == {1: (True, "")}
    sim.call(2, LOAD, "/early")
    sim.submit("asleep", PROMPT, max_new_tokens=1)
    sim.run(2)
    assert said(sim)[2] == (False, "the weights are released")
    sim.call(3, WAKE)
    sim.submit("early", PROMPT, max_new_tokens=1)
    sim.run(2)
    for rid in ("asleep", "early"):
        assert sim.answer(rid).details["status_code"] == 503
        assert "the weights were dropped, and none are loaded" in sim.answer(rid).details["message"]
    sim.plane.partial.add("/some")
    sim.call(4, LOAD, "/some")
    sim.call(5, RESUME)
    sim.run(3)
    assert said(sim)[4] == (
        True,
        "weights loaded from /some; every weight is one that is still to come",
    )
    assert said(sim)[5][0] is False
    assert list(sim.frontend.live) == ["waits"]
    sim.call(6, LOAD, "/all", None, "step-2")
    sim.run(1)
    sim.submit("later", (5, 6), max_new_tokens=1)
    sim.run_until_idle()
    assert said(sim)[6] == (True, "weights loaded from /all")
    assert sim.answer("waits").ids == expected(PROMPT, 5)
    assert len(sim.answer("later").ids) == 1
    sim.check_drained()


def test_weights_come_before_the_cache_as_other_engines_clients_have_it():
    sim = Simulation(SPECS)
    for call, (method, *args) in enumerate(
        [(RELEASE, None, True), (WAKE, ["weights"]), (LOAD, "/all"), (WAKE, ["kv_cache"])]
    ):
        sim.call(call, method, *args)
        sim.run(3)
    assert all(success for success, _ in said(sim).values())
    sim.submit("r", PROMPT, max_new_tokens=2)
    sim.run_until_idle()
    assert sim.answer("r").ids == expected(PROMPT, 2)


def test_a_resume_calls_a_release_off():
    sim = Simulation(SPECS)
    sim.submit("r", PROMPT, max_new_tokens=30)
    sim.call(1, RELEASE)
    sim.run(5)
    sim.call(2, RESUME)
    sim.run_until_idle()
    assert said(sim) == {1: (False, "resumed before the release drained"), 2: (True, "")}
    assert not sim.plane.gone
    assert sim.answer("r").ids == expected(PROMPT, 30)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_keep_pause_is_answered_in_the_round_that_hears_of_it(depth):
    sim = Simulation(small_specs(num_pages=129, eos_token_ids=(511,)), depth=depth)
    for n in range(8):
        sim.submit(f"r{n}", (*PROMPT, n), max_new_tokens=30)
    sim.run(12)
    sim.call(1, PAUSE, "keep")
    sim.run(1)
    assert said(sim) == {1: (True, "")}
    sim.run(1)
    told = {rid: list(live.ids) for rid, live in sim.frontend.live.items()}
    sim.call(2, RELEASE)
    sim.run(20)
    assert said(sim)[2] == (
        False,
        "paused with mode keep; call resume_scheduler, or pause with mode wait or abort",
    )
    assert {rid: live.ids for rid, live in sim.frontend.live.items()} == told
    sim.call(3, RESUME)
    sim.run_until_idle()
    for n in range(8):
        assert sim.answer(f"r{n}").ids == expected((*PROMPT, n), 30)


# --- several ranks

LAYOUTS = [Layout(2, 1), Layout(1, 2), Layout(2, 2), Layout(1, 1, 2)]


def operated(layout, calls, last=80):
    """Return a scenario: a request for every engine, and calls as (round, engine, method, …)."""
    return engines(layout, long_requests(20), on_each(calls), last=last)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("late", [0, 15])
def test_all_ranks_release_in_one_round_however_late_one_hears_of_it(layout, late):
    calls = [
        (3, 0, RELEASE),
        (3 + late, 1, RELEASE),
        (60, 0, WAKE),
        (60 + late, 1, WAKE),
    ]
    fleet = play(operated(layout, calls, last=100), 1)
    fleet.check()
    first = {min(round_ for who, round_ in fleet.gone if who == rank) for rank in fleet.sims}
    assert len(first) == 1
    assert first.pop() >= 20, "nobody's answer was cut short"
    for engine in range(layout.data):
        owner = fleet.owner(engine)
        assert owner.answer(f"r{engine}").ids == expected((*PROMPT, engine), 20, 1)
        assert all(success for success, _ in said(owner).values())


def test_an_idle_engine_that_was_not_asked_keeps_the_others_from_releasing():
    layout = Layout(1, 2)
    fleet = play(operated(layout, [(3, 0, RELEASE), (70, 0, RESUME)], last=90), 1)
    fleet.check()
    assert not fleet.gone
    assert said(fleet.owner(0)) == {
        0: (False, "resumed before the release drained"),
        1: (True, ""),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("late", [0, 15])
def test_no_rank_forwards_until_all_have_weights_again(layout, late):
    calls = [
        (3, 0, RELEASE, None, True),
        (3 + late, 1, RELEASE, None, True),
        (60, 0, WAKE),
        (60 + late, 1, WAKE),
        (61 + late, 0, LOAD, "/all"),
        (61 + 2 * late, 1, LOAD, "/all"),
    ]
    played = operated(layout, calls, last=130)
    late_one = Asked(engine=0, rid="late", prompt=PROMPT, limit=4, seed=1)
    played.acts[0, 100] = [submitting(late_one)]
    played = Scenario(layout, 1, SPECS, played.lags, (*played.asked, late_one), played.acts)
    fleet = play(played, 1)
    fleet.check()
    assert fleet.owner(0).answer("late").ids == expected(PROMPT, 4, 1)
    assert {sim.plane.weights for sim in fleet.sims.values()} == {"/all"}
    for engine in range(layout.data):
        assert all(success for success, _ in said(fleet.owner(engine)).values())
        assert fleet.owner(engine).answer(f"r{engine}").ids == expected((*PROMPT, engine), 20, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("drops", [False, True])
def test_where_one_rank_cannot_none_does_and_all_serve_on(layout, drops):
    calls = [(3, 0, RELEASE, None, drops), (5, 1, RELEASE, None, drops)]
    poor = layout.size - 1

    def plant(rank, sim):
        if rank == poor:
            sim.plane.unreleasable = "no room on the disk"

    played = operated(layout, calls, last=80)
    late = Asked(engine=0, rid="late", prompt=PROMPT, limit=4, seed=1)
    played.acts[0, 60] = [submitting(late)]
    played = Scenario(layout, 1, SPECS, played.lags, (*played.asked, late), played.acts)
    fleet = play(played, 1, plant)
    fleet.check()
    assert fleet.owner(0).answer("late").ids == expected(PROMPT, 4, 1)
    for engine in range(layout.data):
        ((success, message),) = said(fleet.owner(engine)).values()
        assert not success
        own = layout.replica(poor)[0] == poor and engine == layout.data_index(poor)
        reason = "no room on the disk" if own else "another rank could not"
        assert message == f"nothing was released: {reason}"


def test_a_pause_on_one_engine_and_a_release_on_the_other_keep_each_to_its_own():
    layout = Layout(1, 2)
    calls = [(3, 0, RELEASE), (3, 1, PAUSE, "wait"), (50, 0, RESUME), (50, 1, RESUME)]
    fleet = play(operated(layout, calls), 1)
    fleet.check()
    assert not fleet.gone
    assert said(fleet.owner(0))[0] == (False, "resumed before the release drained")
    assert said(fleet.owner(1))[1] == (True, "")
