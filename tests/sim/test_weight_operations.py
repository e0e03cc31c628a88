"""Operations on weights on engines of several ranks: in one round, on all or on none, told once."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operated import PROMPT, SPECS, before_and_after, engines, on_all, said

from drumline.contract.layout import Layout
from drumline.contract.regions import Region
from drumline.contract.weights import WeightRows
from drumline.control.operations import _KINDS, TensorParts, WeightsAsked, Work
from drumline.core.errors import InvariantError
from drumline.replay.fleet import Asked, Scenario, calling, play, submitting
from drumline.replay.simulator import Simulation, small_specs

DISK, TENSORS, SENT = (
    "update_weight_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_distributed",
)
JOIN, LEAVE = "init_weights_update_group", "destroy_weights_update_group"
ROWS, VERSION, RENAME = "get_weights_by_name", "get_weight_version", "update_weight_version"
PAUSE, RESUME, WAKE = "pause_scheduler", "resume_scheduler", "resume_memory_occupation"
DISCARDING = small_specs(eos_token_ids=(511,), discards_weights=True)
LAYOUTS = [Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2), Layout(2, 1, 2)]
IN_USE = "the cache is in use; retry once the running requests ended"


def joining(layout, offset=1, **changes):
    asked = {
        "master_address": "10.0.0.1",
        "master_port": 29500,
        "rank_offset": offset,
        "world_size": offset + layout.size,
        "backend": "gloo",
    }
    return JOIN, asked | changes


def sending(*names, **changes):
    asked = {
        "names": list(names),
        "dtype_names": ["bfloat16"] * len(names),
        "shapes": [[2, 2]] * len(names),
    }
    return SENT, asked | changes


def run(layout, calls, plant=lambda rank, sim: None, late=0, specs=SPECS, last=60):
    """Play engines that answer a request before calls (round, method, …) and one after."""
    return play(
        engines(layout, before_and_after, on_all(layout, calls, late), specs, last), 1, plant
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("late", [0, 5])
def test_a_trainers_group_is_joined_served_from_and_left_by_all_ranks_in_one_round(layout, late):
    rounds = {}

    def plant(rank, sim):
        for name in ("join_weight_group", "settle_weights", "leave_weight_group"):
            real = getattr(sim.plane, name)

            def noted(*argument, name=name, real=real):
                rounds.setdefault(name, {})[rank] = len(sim.loop.records.kept)
                told = real(*argument)
                if name == "join_weight_group":
                    (joined,) = sim.plane.groups.values()
                    assert (joined.rank, joined.size) == (3 + rank, 3 + layout.size)
                return told

            setattr(sim.plane, name, noted)

    calls = [
        (20, *joining(layout, 3)),
        (21, *sending("a", "b", weight_version="step-1")),
        (22, *sending("c")),
        (23, LEAVE),
        (24, *sending("d")),
        (39, VERSION),
        (40, LEAVE),
    ]
    fleet = run(layout, calls, plant, late)
    fleet.check()
    for name, when in rounds.items():
        assert len(when) == layout.size, name
        assert len(set(when.values())) == 1, name
    for sim in fleet.sims.values():
        assert sim.plane.weights == "c"
        assert not sim.plane.groups
    for engine in range(layout.data):
        assert said(fleet.owner(engine)) == {
            0: (True, "joined group weight_update_group, from rank 3 on"),
            1: (True, "weights loaded from 2 tensors of group weight_update_group"),
            2: (True, "weights loaded from 1 tensors of group weight_update_group"),
            3: (True, "left group weight_update_group"),
            4: (False, "there is no group weight_update_group"),
            5: (True, "step-1"),
            6: (True, "left group weight_update_group"),
        }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_takes_the_tensors_for_all_or_its_own(layout):
    own = [b"for %d" % rank for rank in range(layout.size)]
    fleet = run(layout, [(20, TENSORS, [b"for all"]), (22, TENSORS, own, None, True, "step-2"),
                         (24, TENSORS, [b"x"] * (layout.size + 2)), (39, VERSION)])  # fmt: skip
    fleet.check()
    for rank, sim in fleet.sims.items():
        assert sim.plane.weights == (f"for {rank}" if layout.size > 1 else "for 0")
    told = said(fleet.owner(0))
    assert told[0] == (True, "weights loaded from 7 bytes of tensors")
    count = layout.size + 2
    assert told[2] == (
        False,
        f"there are {count} serialized_named_tensors; send one for all ranks, or one for each of "
        f"the {layout.size}",
    )
    assert told[3] == (True, "step-2")


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.size > 1])
@pytest.mark.parametrize("poor", [0, -1])
@pytest.mark.parametrize("found", ["unfit", "unreachable"])
def test_a_group_that_one_rank_cannot_join_has_no_rank_and_all_say_why(layout, poor, found):
    poor %= layout.size
    met = []

    def plant(rank, sim):
        real = sim.plane.join_weight_group

        def noted():
            met.append(rank)
            return real()

        sim.plane.join_weight_group = noted
        if rank == poor:
            getattr(sim.plane, found)["weight_update_group"] = "nobody listens"

    fleet = run(layout, [(20, *joining(layout)), (22, *sending("a")), (24, LEAVE)], plant)
    fleet.check()
    # What one rank knows before it meets anybody keeps the others from meeting.
    assert sorted(met) == ([] if found == "unfit" else list(range(layout.size)))
    for sim in fleet.sims.values():
        assert not sim.plane.groups
        assert sim.plane.weights == ""
    for engine in range(layout.data):
        owner = fleet.owner(engine)
        assert said(owner) == {
            0: (False, "nobody listens"),
            1: (False, "there is no group weight_update_group"),
            2: (True, "left group weight_update_group"),
        }
        # The refused load flushed nothing.
        assert owner.answer(f"r{engine}-40").cached_tokens == 16


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.size > 1])
def test_a_group_that_sent_to_some_ranks_only_is_over_on_all(layout):
    def plant(rank, sim):
        if rank == layout.size - 1:
            sim.plane.broken["b"] = "it did not come"

    calls = [(20, *joining(layout)), (22, *sending("a")), (24, *sending("b")), (26, *sending("a"))]
    fleet = run(layout, calls, plant)
    fleet.check()
    for sim in fleet.sims.values():
        assert (sim.plane.weights, sim.plane.groups) == ("a", {})
    for engine in range(layout.data):
        told = said(fleet.owner(engine))
        assert [told[call][0] for call in range(4)] == [True, True, False, False]
        assert told[3][1] == "there is no group weight_update_group"


def test_a_group_without_room_for_all_ranks_is_joined_by_none():
    layout = Layout(2, 2)
    fleet = run(layout, [(20, *joining(layout, 1, world_size=4))])
    fleet.check()
    told = (
        False,
        "world_size 4 leaves no room for this engine's 4 ranks from rank_offset 1 on",
    )
    assert [said(fleet.owner(engine))[0] for engine in range(2)] == [told, told]


@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(2, 2)])
def test_operations_in_different_orders_stop_all_ranks_with_one_message(layout):
    acts = {(0, 60): []}
    for engine in range(2):
        operations = [(DISK, "/new"), (TENSORS, [b"x"])]
        for nth, operation in enumerate(operations if engine else reversed(operations)):
            acts.setdefault((engine, 5 + 3 * engine + nth), []).append(calling(nth, *operation))
    ended = {}

    def plant(rank, sim):
        real = sim.loop.round

        def noted(stop):
            try:
                return real(stop)
            except Exception as error:
                ended[rank] = str(error), sim.plane.weights
                raise

        sim.loop.round = noted

    with pytest.raises(InvariantError, match="hold different operations at the head"):
        play(Scenario(layout, 1, SPECS, (0,) * layout.size, (), acts), 1, plant)
    assert len(ended) == layout.size
    ((message, weights),) = set(ended.values())
    assert "update_weights_from_disk and update_weights_from_tensor" in message
    assert weights == ""


def test_one_replica_that_is_to_forget_its_prefixes_has_all_do_it():
    layout = Layout(2, 2)
    asked = tuple(Asked(engine, f"r{engine}", PROMPT, 4, 1) for engine in range(2))
    later = tuple(Asked(engine, f"s{engine}", PROMPT, 4, 1) for engine in range(2))
    acts = {(0, 60): []}
    for engine in range(2):
        acts[engine, 0] = [submitting(asked[engine])]
        acts[engine, 20] = [calling(1, DISK, "/new", None, None, not engine)]
        acts[engine, 40] = [submitting(later[engine])]
    fleet = play(Scenario(layout, 1, SPECS, (0,) * 4, asked + later, acts), 1)
    fleet.check()
    assert [fleet.owner(e).answer(f"s{e}").cached_tokens for e in range(2)] == [0, 0]


# The policy to give up what serves before.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_discarded_weights_without_others_block_every_rank_and_say_so(layout):
    poor = layout.size - 1

    def plant(rank, sim):
        if rank == poor:
            sim.plane.broken["/new"] = "cut short"

    calls = [(10, DISK, "/new", None, "step-7"), (39, VERSION), (42, DISK, "/new"), (43, RESUME),
             (44, ROWS, "w")]  # fmt: skip
    fleet = run(layout, calls, plant, specs=DISCARDING)
    fleet.check()
    assert {sim.plane.weights for sim in fleet.sims.values()} == {None}
    for engine in range(layout.data):
        owner = fleet.owner(engine)
        told = said(owner)
        lost = told[0][1]
        assert lost == (
            "the weights were discarded, and others could not be loaded: cut short; the engine "
            "must be started again"
        )
        assert told == {0: (False, lost), 1: (True, "default")} | dict.fromkeys(
            (2, 3, 4), (False, lost)
        )
        refused = owner.answer(f"r{engine}-40")
        assert (refused.finished, refused.ids) == ("abort", [])
        assert refused.details["message"] == lost


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_all_ranks_refuse_before_or_take_discards_nothing(layout):
    def plant(rank, sim):
        sim.plane.unreadable["/other"] = "no such shape"

    calls = [(20, DISK, "/other"), (22, DISK, "/new", None, "step-7"), (39, VERSION)]
    fleet = run(layout, calls, plant, specs=DISCARDING)
    fleet.check()
    for engine in range(layout.data):
        owner = fleet.owner(engine)
        assert said(owner) == {
            0: (False, "no such shape"),
            1: (True, "weights loaded from /new"),
            2: (True, "step-7"),
        }
        assert len(owner.answer(f"r{engine}-40").ids) == 4


def test_whatever_was_kept_withheld_or_queued_ends_with_the_weights():
    sim = Simulation(DISCARDING)
    sim.plane.broken["/new"] = "cut short"
    sim.submit("runs", PROMPT, max_new_tokens=30)
    sim.run(5)
    sim.call(1, PAUSE, "keep")
    sim.run(2)
    sim.submit("withheld", PROMPT, max_new_tokens=3)
    sim.run(1)
    sim.call(2, DISK, {"model_path": "/new", "flush_cache": False})
    sim.call(3, DISK, "/new")
    sim.call(4, ROWS, "w")
    sim.run(6)
    lost = said(sim)[2][1]
    assert said(sim)[3] == said(sim)[4] == (False, lost)
    for rid in ("runs", "withheld"):
        assert (sim.answer(rid).finished, sim.answer(rid).details["message"]) == ("abort", lost)
    assert sim.loop.idle
    sim.check_drained()


# What is asked, and in which order.


def test_an_update_comes_while_the_kv_cache_is_away():
    sim = Simulation(SPECS)
    sim.call(1, "release_memory_occupation")
    sim.run(3)
    sim.call(2, TENSORS, [b"early"])
    sim.run(2)
    assert said(sim)[2] == (False, "the weights are released")
    sim.call(3, WAKE, ["weights"])
    sim.call(4, TENSORS, [b"new"])
    sim.run(2)
    assert said(sim)[4] == (True, "weights loaded from 3 bytes of tensors")
    assert sim.plane.gone == {Region.KV_CACHE}
    sim.call(5, WAKE)
    sim.submit("r", PROMPT, max_new_tokens=3)
    sim.run(12)
    assert len(sim.answer("r").ids) == 3
    assert sim.plane.weights == "new"


def test_an_update_that_keeps_the_prefixes_comes_amid_requests_and_one_that_does_not_is_refused():
    sim = Simulation(SPECS)
    sim.submit("r", PROMPT, max_new_tokens=30)
    sim.run(5)
    sim.call(1, TENSORS, [b"new"])
    sim.call(2, TENSORS, [b"bucket"], None, False)
    sim.run(3)
    assert said(sim) == {
        1: (False, IN_USE),
        2: (True, "weights loaded from 6 bytes of tensors"),
    }
    assert sim.plane.weights == "bucket"


def test_the_weights_that_serve_can_be_called_something_else():
    sim = Simulation(SPECS, weight_version="step-3")
    sim.call(1, VERSION)
    sim.call(2, RENAME, "step-4")
    sim.call(3, RENAME, "")
    sim.call(4, VERSION)
    sim.run(1)
    told = said(sim)
    assert (told[1], told[4]) == ((True, "step-3"), (True, "step-4"))
    assert told[3][1].endswith("it takes new_version")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_is_told_whole_whichever_ranks_have_it(layout):
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    ranks = layout.tensor

    def plant(rank, sim):
        place = layout.tensor_index(rank)
        rows, columns = 6 // ranks, 4 // ranks
        at, left = place * rows, place * columns
        told = whole[:5]
        own = whole[at : min(5, at + rows)]
        sim.plane.shown |= {
            "norm": WeightRows((6, 4), told.tobytes()),
            "query": WeightRows((6, 4), own.tobytes(), 0, at, at + len(own)),
            "out": WeightRows(
                (6, 4), np.ascontiguousarray(told[:, left : left + columns]).tobytes(), 1, left,
                left + columns,
            ),
            "bias": WeightRows((6,), whole.ravel()[:5].tobytes()),
        }  # fmt: skip
        if layout.pipeline > 1:
            there = {"norm"} if layout.stage_index(rank) else {"query", "out", "bias"}
            sim.plane.shown |= dict.fromkeys(sim.plane.shown.keys() - there)

    names = ["norm", "query", "out", "bias", "none"]
    calls = [(20 + n, ROWS, name, 5) for n, name in enumerate(names)]
    fleet = run(layout, [*calls, (30, ROWS, {"name": "norm", "truncate_size": 0})], plant)
    fleet.check()
    for engine in range(layout.data):
        told = said(fleet.owner(engine))
        for call in range(3):
            assert (told[call][0], json.loads(told[call][1])) == (True, whole[:5].tolist())
        assert json.loads(told[3][1]) == whole.ravel()[:5].tolist()
        assert told[4] == (False, "no weight here is called none")
        assert "`int` >= 1" in told[5][1]


MALFORMED = [
    ((TENSORS,), "missing required field `serialized_named_tensors`"),
    ((TENSORS, []), "length >= 1"),
    ((TENSORS, [b"x"], "flattened_bucket"), "Invalid enum value 'flattened_bucket'"),
    (sending("a", dtype_names=[]), "there are 1 names, 0 dtype_names and 1 shapes"),
    (sending("a", "b", "a"), "a is named twice"),
    (sending("a", shapes=[[-1]]), "`int` >= 0"),
    (sending(), "length >= 1"),
    (joining(Layout(), 0), "`int` >= 1"),
    (joining(Layout(), master_port=0), "`int` >= 1"),
    ((LEAVE, 7), "Expected `str`"),
    ((ROWS,), "missing required field `name`"),
]


@pytest.mark.parametrize(("call", "message"), MALFORMED)
def test_an_operation_that_makes_no_sense_is_refused_with_what_it_takes(call, message):
    sim = Simulation(SPECS)
    sim.call(1, *call)
    sim.run(1)
    success, told = said(sim)[1]
    assert not success
    assert message in told


@given(
    operations=st.lists(
        st.tuples(
            st.sampled_from(["disk", "tensors", "sent", "join", "leave"]),
            st.sampled_from(["good", "refused", "broken"]),
            st.lists(st.integers(0, 4), min_size=3, max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    layout=st.sampled_from([*LAYOUTS, Layout(1, 3)]),
    discards=st.booleans(),
    order=st.integers(0, 9),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_whatever_arrives_when_all_ranks_end_with_the_same_weights_and_each_call_is_answered(
    operations, layout, discards, order, data
):
    poor = data.draw(st.integers(0, layout.size - 1))
    asked, acts, heard, last = [], {}, [0] * layout.data, 0
    for call, (kind, fate, gaps, flush) in enumerate(operations):
        name = f"{fate}-{call}"
        operation = {
            "disk": (DISK, name, None, f"v{call}", flush),
            "tensors": (TENSORS, [name.encode()], None, flush, f"v{call}"),
            "sent": sending(name, flush_cache=flush, weight_version=f"v{call}"),
            "join": joining(layout),
            "leave": (LEAVE,),
        }[kind]
        for engine in range(layout.data):
            heard[engine] += gaps[engine]
            last = max(last, heard[engine])
            acts.setdefault((engine, heard[engine]), []).append(calling(call, *operation))
    for engine in range(layout.data):
        one = Asked(engine, f"r{engine}", PROMPT, 3, 1)
        asked.append(one)
        acts.setdefault((engine, last + 12), []).append(submitting(one))
        acts.setdefault((engine, last + 12), []).append(calling(99, VERSION))

    def plant(rank, sim):
        if rank == poor:
            sim.plane.unreadable = {f"refused-{n}": "refused" for n in range(6)}
            sim.plane.broken = {f"broken-{n}": "broken" for n in range(6)}

    specs = DISCARDING if discards else SPECS
    fleet = play(
        Scenario(layout, 1, specs, (0,) * layout.size, tuple(asked), acts), 1, plant, order=order
    )
    fleet.check()
    weights = {sim.plane.weights for sim in fleet.sims.values()}
    assert len(weights) == 1
    assert len({tuple(sim.plane.groups) for sim in fleet.sims.values()}) == 1
    taken = [
        call
        for call in range(len(operations))
        if said(fleet.owner(0))[call][0] and operations[call][0] not in {"join", "leave"}
    ]
    for engine in range(layout.data):
        told = said(fleet.owner(engine))
        assert {call for call, (success, _) in told.items() if success and call < 99} == {
            call for call, (success, _) in said(fleet.owner(0)).items() if success and call < 99
        }
        assert told[99] == (True, f"v{taken[-1]}" if taken else "default")
        lost = weights == {None}
        assert fleet.owner(engine).answer(f"r{engine}").finished == ("abort" if lost else "length")
    if taken and weights != {None}:
        assert weights == {f"{operations[taken[-1]][1]}-{taken[-1]}"}


def test_every_kind_of_work_has_a_code_of_its_own_at_the_gate():
    assert set(_KINDS) == set(Work.__args__)
    assert len(set(_KINDS.values())) == len(_KINDS)
    assert WeightsAsked(1, TensorParts(())).kind.name == "UPDATE_WEIGHTS_FROM_TENSOR"
