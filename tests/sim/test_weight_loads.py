"""Loads of other weights on engines of several ranks: on all or on none, and flushed or refused."""

import pytest
from operated import PROMPT, SPECS, before_and_after, engines, on_all, said

from drumline.contract.layout import Layout
from drumline.core.errors import InvariantError
from drumline.replay.fleet import Asked, Scenario, calling, play, submitting
from drumline.replay.simulator import Simulation

LOAD, VERSION = "update_weight_from_disk", "get_weight_version"
PAUSE, RESUME, RELEASE = "pause_scheduler", "resume_scheduler", "release_memory_occupation"
LAYOUTS = [Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2), Layout(1, 2, 2)]


def run(layout, calls, plant=lambda rank, sim: None, late=0, last=60):
    """Play engines that answer a request before calls (round, method, …) and one after."""
    played = engines(layout, before_and_after, on_all(layout, calls, late), last=last)
    fleet = play(played, 1, plant)
    fleet.check()
    return fleet


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("late", [0, 5])
def test_all_ranks_take_other_weights_in_one_round_and_forget_their_prefixes(layout, late):
    taken = {}

    def plant(rank, sim):
        settle = sim.plane.settle_weights

        def noted(agreed):
            taken[rank] = len(sim.loop.records.kept)
            settle(agreed)

        sim.plane.settle_weights = noted

    calls = [(20, VERSION), (22, LOAD, "/new", None, "step-7"), (39, VERSION)]
    fleet = run(layout, calls, plant, late)
    assert {sim.plane.weights for sim in fleet.sims.values()} == {"/new"}
    assert len(set(taken.values())) == 1
    for engine in range(layout.data):
        owner = fleet.owner(engine)
        assert said(owner) == {
            0: (True, "default"),
            1: (True, "weights loaded from /new"),
            2: (True, "step-7"),
        }
        assert owner.answer(f"r{engine}-40").cached_tokens == 0


def test_a_load_that_does_not_flush_keeps_prefixes_and_one_without_a_name_keeps_the_old_one():
    fleet = run(Layout(1, 1), [(20, LOAD, {"model_path": "/new", "flush_cache": False}),
                               (30, VERSION)])  # fmt: skip
    assert fleet.owner(0).answer("r0-40").cached_tokens == 16
    assert said(fleet.owner(0))[1] == (True, "default")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("opens", [True, False])
def test_where_one_rank_cannot_none_does_and_nothing_is_flushed_unless_it_broke_late(layout, opens):
    poor = layout.size - 1

    def plant(rank, sim):
        sim.plane.weights = "/old"
        if rank == poor:
            faults = sim.plane.broken if opens else sim.plane.unreadable
            faults["/new"] = "no such tensor"

    fleet = run(layout, [(20, LOAD, "/new", None, "step-7"), (39, VERSION)], plant)
    assert {sim.plane.weights for sim in fleet.sims.values()} == {"/old"}
    for engine in range(layout.data):
        owner = fleet.owner(engine)
        (success, message), version = (said(owner)[call] for call in (0, 1))
        assert not success
        # Every engine's frontend hears the reason, wherever the rank is.
        assert message == "no such tensor"
        assert version == (True, "default")
        assert owner.answer(f"r{engine}-40").cached_tokens == (0 if opens else 16)


def test_a_load_while_requests_hold_cached_pages_is_refused_and_loads_nothing():
    sim = Simulation(SPECS)
    sim.submit("r", PROMPT, max_new_tokens=30)
    sim.run(5)
    sim.call(1, LOAD, "/new")
    sim.run(2)
    assert said(sim) == {1: (False, "the cache is in use; retry once the running requests ended")}
    sim.call(2, PAUSE, "wait")
    sim.run(40)
    sim.call(3, LOAD, "/new")
    sim.run(1)
    assert said(sim)[3] == (True, "weights loaded from /new")
    assert sim.plane.weights == "/new"


def test_loads_are_done_one_a_round_in_their_order_and_a_release_waits_for_them():
    sim = Simulation(SPECS)
    for call, path in enumerate(("/a", "/b", "/c")):
        sim.call(call, LOAD, path)
    sim.call(3, RELEASE)
    served = []
    for _ in range(5):
        sim.run(1)
        served.append((sim.plane.weights, bool(sim.plane.gone)))
    assert served == [("/a", False), ("/b", False), ("/c", True), ("/c", True), ("/c", True)]
    sim.plane.unreadable["/d"] = "the weights are released"
    sim.call(4, LOAD, "/d")
    sim.run(2)
    assert said(sim)[4] == (False, "the weights are released")


MALFORMED = [
    ((), "missing required field `model_path`"),
    (("",), "length >= 1"),
    ((7,), "Expected `str`"),
    (("/m", "pickle"), "Invalid enum value 'pickle'"),
    (({"model_path": "/m", "format": "gguf"},), "unknown field `format`"),
    (("/m", None, 3), "weight_version"),
]


@pytest.mark.parametrize(("args", "message"), MALFORMED)
def test_a_load_that_makes_no_sense_is_refused_with_what_it_takes(args, message):
    sim = Simulation(SPECS)
    sim.call(1, LOAD, *args)
    sim.run(1)
    success, told = said(sim)[1]
    assert not success
    assert message in told
    assert told.endswith("it takes model_path, load_format, weight_version, flush_cache")


def test_engines_that_never_hear_of_it_keep_a_load_waiting_and_serve_on():
    layout = Layout(1, 2)
    asked = (Asked(1, "r", PROMPT, 12, 1),)
    acts = {(0, 3): [calling(1, LOAD, "/new")], (1, 6): [submitting(asked[0])], (0, 40): []}
    fleet = play(Scenario(layout, 0, SPECS, (0, 0), asked, acts), 1)
    assert said(fleet.owner(0)) == {}
    assert len(fleet.owner(1).answer("r").ids) == 12
    with pytest.raises(InvariantError, match="did not answer every call"):
        fleet.check()
