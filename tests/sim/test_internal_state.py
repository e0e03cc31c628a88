"""Settings that change while an engine serves: in one round on all ranks, and no answer changes."""

import json
import random
from itertools import islice

import pytest
from operated import SPECS, said

from drumline.contract.internal_state import Adjustments
from drumline.contract.layout import Layout
from drumline.replay.arithmetic import answer
from drumline.replay.fleet import Asked, Scenario, calling, play, submitting
from drumline.replay.simulator import Simulation

SET, GET = "set_internal_state", "get_internal_state"
LAYOUTS = [Layout(2, 1), Layout(1, 2), Layout(2, 2)]
AT_START = {
    "chunked_prefill_size": 32,
    "mixed_batch": True,
    "mixed_prefill_tokens": None,
    "max_num_queued_reqs": None,
    "max_num_queued_tokens": None,
}


def asked_once(*call):
    sim = Simulation(SPECS)
    sim.call(1, *call)
    sim.run(1)
    sim.call(2, GET)
    sim.run(1)
    told = said(sim)
    return told[1], json.loads(told[2][1])


def test_a_rank_tells_how_it_stands_and_what_may_be_set():
    sim = Simulation(SPECS, depth=1)
    sim.submit("r", range(1, 18), max_new_tokens=20, ignore_eos=True)
    sim.run(4)
    sim.call(1, "pause_scheduler", "keep")
    sim.submit("later", (1, 2), max_new_tokens=1)
    sim.call(2, GET)
    sim.run(1)
    assert json.loads(said(sim)[2][1]) == {
        "round": 5, "standing": "kept", "released": [], "weight_version": "default",
        "profiling": False, "withheld": 1, "in_flight": 0, "running": 2, "waiting": 0,
        "settings": AT_START,
    }  # fmt: skip


def test_requests_that_were_aborted_meanwhile_are_not_counted_as_withheld():
    sim = Simulation(SPECS)
    sim.call(1, "pause_scheduler", "keep")
    for rid in ("stays", "leaves"):
        sim.submit(rid, (1, 2), max_new_tokens=1)
    sim.run(1)
    sim.abort("leaves")
    sim.call(2, GET)
    sim.run(1)
    assert json.loads(said(sim)[2][1])["withheld"] == 1


def test_what_is_set_is_told_and_what_is_left_out_stays():
    changes = {"chunked_prefill_size": 8, "max_num_queued_reqs": 3}
    (success, message), state = asked_once(SET, {"server_args": changes})
    assert success
    assert json.loads(message) == AT_START | changes
    assert state["settings"] == AT_START | changes


def test_null_takes_a_limit_away():
    sim = Simulation(SPECS)
    for call, limit in enumerate((3, None), 1):
        sim.call(call, SET, {"max_num_queued_reqs": limit})
        sim.run(1)
    assert json.loads(said(sim)[2][1]) == AT_START


REFUSED = [
    ({"tensor_parallel_size": 2}, "unknown field `tensor_parallel_size`"),
    ({"mixed_batch": 1}, "Expected `bool`, got `int` - at `$.mixed_batch`"),
    ({"max_num_queued_reqs": 0}, "Expected `int` >= 1 - at `$.max_num_queued_reqs`"),
    ({"max_num_queued_reqs": "many"}, "got `str` - at `$.max_num_queued_reqs`"),
    ({"chunked_prefill_size": None}, "got `null` - at `$.chunked_prefill_size`"),
    ({"chunked_prefill_size": 8, "colour": "red"}, "unknown field `colour`"),
    ({}, "nothing is to be set"),
    (None, "Expected `object`, got `null`"),
    (7, "Expected `object`, got `int`"),
]


@pytest.mark.parametrize(("asked", "told"), REFUSED)
def test_what_may_not_be_set_is_refused_by_name_and_sets_nothing(asked, told):
    (success, message), state = asked_once(SET, {"server_args": asked})
    assert not success
    assert told in message
    assert message.endswith(", ".join(Adjustments.__struct_fields__))
    assert state["settings"] == AT_START


def test_a_rank_computes_no_more_at_a_time_than_it_was_laid_out_for():
    (success, message), state = asked_once(SET, {"chunked_prefill_size": 33, "mixed_batch": False})
    assert not success
    assert message == "chunked_prefill_size 33 is above 32, with which the rank started"
    assert state["settings"] == AT_START


def test_settings_hold_from_the_next_plan_on():
    sim = Simulation(SPECS)
    sim.call(1, SET, {"chunked_prefill_size": 4, "max_num_queued_reqs": 1})
    sim.submit("long", range(1, 18), max_new_tokens=1)
    sim.run(2)
    assert [record.tokens for record in sim.loop.records.kept] == [4, 4]
    for n in range(12):
        sim.submit(f"r{n}", (1, 2, n), max_new_tokens=1)
    sim.run_until_idle()
    refused = [rid for rid, told in sim.frontend.over if told.finished == "abort"]
    assert refused, "more waited than may"


@pytest.mark.parametrize("seed", range(6))
def test_settings_change_on_all_ranks_in_one_round_and_no_answer_changes(seed):
    rng = random.Random(seed)
    layout = rng.choice(LAYOUTS)
    asked, acts = [], {(0, 80): []}
    for engine in range(layout.data):
        for n in range(5):
            prompt = tuple(rng.randrange(1, 500) for _ in range(rng.randint(1, 60)))
            one = Asked(engine, f"r{engine}-{n}", prompt, 12, 1)
            asked.append(one)
            acts.setdefault((engine, rng.randrange(30)), []).append(submitting(one))
    heard = [0] * layout.data
    expected = dict(AT_START)
    for call in range(8):
        changes = {
            "chunked_prefill_size": rng.randint(1, 32),
            "mixed_batch": rng.random() < 0.5,
            "mixed_prefill_tokens": rng.choice((None, 1, 5)),
        }
        changes = dict(rng.sample(sorted(changes.items()), rng.randint(1, 3)))
        expected |= changes
        for engine in range(layout.data):
            heard[engine] += rng.choice((0, 1, 7))
            acts.setdefault((engine, heard[engine]), []).append(calling(call, SET, changes))
    changed = {}

    def plant(rank, sim):
        adjust = sim.scheduler.adjust

        def noted(changes):
            changed.setdefault(rank, []).append((sim.loop._relay.round, changes))
            return adjust(changes)

        sim.loop._agreements._scheduler = Watched(sim.scheduler, noted)

    fleet = play(Scenario(layout, 1, SPECS, (0,) * layout.size, tuple(asked), acts), seed, plant)
    fleet.check()
    assert len(changed[0]) == 8
    assert all(rounds == changed[0] for rounds in changed.values())
    for engine in range(layout.data):
        assert all(success for success, _ in said(fleet.owner(engine)).values())
        assert json.loads(said(fleet.owner(engine))[7][1]) == expected
    for one in asked:
        ids = list(islice(answer(list(one.prompt), 1, 512), 12))
        ids = ids[: ids.index(511) + 1] if 511 in ids else ids
        assert fleet.owner(one.engine).answer(one.rid).ids == ids


class Watched:
    """A scheduler whose changes of settings are noted."""

    def __init__(self, scheduler, adjust):
        self._scheduler = scheduler
        self.adjust = adjust

    def __getattr__(self, name):
        return getattr(self._scheduler, name)
