"""Profiles on engines of several ranks: begun by all in one round, and changing none of theirs."""

import pytest
from operated import engines, long_requests, on_all, said

from drumline.contract.layout import Layout
from drumline.contract.profile import Stage
from drumline.replay.fleet import play

START, STOP = "start_profile", "stop_profile"
LAYOUTS = [Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2), Layout(1, 1, 2)]
ID = {"profile_id": "p"}


def run(layout, calls, plant=lambda rank, sim: None, late=0):
    """Play engines that answer a long request each, and hear of calls (round, method, …)."""
    fleet = play(engines(layout, long_requests(30), on_all(layout, calls, late)), 1, plant)
    fleet.check()
    return fleet


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("late", [0, 5])
def test_all_ranks_record_the_same_rounds_however_late_one_hears_of_it(layout, late):
    fleet = run(layout, [(6, START, ID | {"num_steps": 8}), (25, STOP)], late=late)
    recorded = []
    for sim in fleet.sims.values():
        (one,) = sim.plane.profiled
        assert one.over
        assert one.recording.root == "/profiles"
        recorded.append(one.rounds)
    assert len({tuple(rounds) for rounds in recorded}) == 1
    assert len(recorded[0]) == 8
    # What the control thread did in those rounds goes with them.
    dispatched = {
        span.facts["round"]: span.facts.get("requests")
        for span in fleet.owner(0).plane.profiled[0].spans
        if span.name == "dispatch"
    }
    assert [dispatched[round_] for round_ in recorded[0]] == [["r0"]] * 8
    for engine in range(layout.data):
        begun, ended = said(fleet.owner(engine)).values()
        assert begun[0]
        assert ended == (True, "profile p: 8 forwards, in /profiles/p-*.trace.json.gz of each rank")


def test_recording_changes_no_round():
    layout = Layout(2, 2)
    quiet = [(6, "is_sleeping"), (20, "is_sleeping")]
    plain = run(layout, quiet)
    seen = run(layout, [(6, START, ID), (20, STOP)])
    for rank, sim in seen.sims.items():
        assert sim.plane.profiled[0].rounds
        rounds = [record.digest for record in sim.loop.records.kept]
        others = [record.digest for record in plain.sims[rank].loop.records.kept]
        # But for the messages themselves.
        assert [(d.round, d.rows, d.lengths, d.blocks, d.requests, d.results) for d in rounds] == [
            (d.round, d.rows, d.lengths, d.blocks, d.requests, d.results) for d in others
        ]


def test_stages_have_a_recording_each():
    calls = [(0, START, ID | {"num_steps": 4, "profile_by_stage": True}), (30, STOP)]
    sim = run(Layout(1, 1), calls).owner(0)
    first, second = sim.plane.profiled
    assert (first.stage, second.stage) == (Stage.EXTEND, Stage.DECODE)
    assert len(second.rounds) == 4
    assert said(sim)[1][1].startswith("profile p: 1 forwards of EXTEND, 4 forwards of DECODE")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_one_rank_cannot_record_none_does(layout):
    poor = layout.size - 1

    def plant(rank, sim):
        if rank == poor:
            sim.plane.unrecordable = "activity 'GPU' cannot be recorded here; CPU, MEM can"

    fleet = run(layout, [(6, START, ID), (20, STOP)], plant)
    for rank, sim in fleet.sims.items():
        assert not sim.plane.profiled, rank
    for engine in range(layout.data):
        own = layout.replica(poor)[0] == poor and engine == layout.data_index(poor)
        (started, why), (stopped, refusal) = said(fleet.owner(engine)).values()
        assert not started
        assert why == (
            "activity 'GPU' cannot be recorded here; CPU, MEM can"
            if own
            else "another rank cannot record this; its log says why"
        )
        assert not stopped
        assert refusal == "no profile is in progress; call start_profile first"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_that_one_rank_could_not_write_is_told_to_all_who_asked(layout):
    poor = layout.size - 1

    def plant(rank, sim):
        if rank == poor:
            stop = sim.plane.stop_profile
            sim.plane.stop_profile = lambda spans: stop(spans) or "no space left"

    fleet = run(layout, [(6, START, ID | {"num_steps": 8}), (25, STOP)], plant)
    for engine in range(layout.data):
        own = layout.replica(poor)[0] == poor and engine == layout.data_index(poor)
        told = "no space left" if own else "another rank wrote no file; its log says why"
        assert said(fleet.owner(engine))[1] == (False, told)


MALFORMED = [
    ({"num_steps": 0}, "Expected `int` >= 1 - at `$.num_steps`"),
    ({"num_steps": 1001}, "Expected `int` <= 1000 - at `$.num_steps`"),
    ({"colour": "red"}, "unknown field `colour`"),
    ({"profile_id": "../x"}, "$.profile_id"),
    ({"profile_id": "x\n"}, "$.profile_id"),
    ({"activities": []}, "$.activities"),
    ({"activities": "CPU"}, "Expected `array | null`, got `str`"),
    ("now", "Expected `object`, got `str`"),
]


@pytest.mark.parametrize(("asked", "told"), MALFORMED)
def test_a_start_that_makes_no_sense_is_refused_with_what_it_takes(asked, told):
    fleet = run(Layout(1, 1), [(6, START, asked)])
    success, message = said(fleet.owner(0))[0]
    assert not success
    assert told in message
    assert message.endswith("with_stack, record_shapes, profile_id")
    assert not fleet.owner(0).plane.profiled
