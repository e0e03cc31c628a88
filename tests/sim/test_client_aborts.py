"""Clients that take a request back: whenever they do, it ends once and nobody else notices."""

from itertools import islice

import pytest
from tests.fakes.grammars import Line

from drumline.contract.grammar import Compiling, GrammarKey, GrammarKind
from drumline.replay.arithmetic import answer
from drumline.replay.simulator import Simulation, small_specs

KEY = GrammarKey(GrammarKind.REGEX, "x")
OTHER = tuple(range(40, 50))
PROMPT = tuple(range(1, 100))
"""Three forwards of 32 tokens and a bit."""


class Compiler:
    """Compiles nothing before it is told to."""

    def __init__(self):
        self.known = Compiling()

    def request(self, key):
        return self.known

    def state(self, key):
        return self.known


@pytest.fixture
def compiler():
    return Compiler()


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def sim(request, compiler):
    simulation = Simulation(
        small_specs(num_pages=129, eos_token_ids=(511,)),
        depth=request.param,
        encoded=True,
        grammars=compiler,
        lag=lambda: 2,
    )
    simulation.submit("other", OTHER, max_new_tokens=40, ignore_eos=True)
    simulation.run(2)
    return simulation


def finish(sim, times=1):
    """Run to the end: the other answer is whole, and nothing is held any more."""
    sim.run_until_idle()
    assert sim.answer("other").ids == list(islice(answer(list(OTHER), 0, 512), 40))
    assert [rid for rid, _ in sim.frontend.over].count("r") == times
    sim.check_drained()


def submit(sim, **changes):
    sim.submit("r", PROMPT, **({"max_new_tokens": 20, "ignore_eos": True} | changes))


AGAIN = pytest.mark.parametrize("aborts", [1, 2], ids=["once", "twice"])


def abort(sim, aborts):
    """Take the request back, perhaps twice: in one message, and in a later one."""
    sim.abort(*["r"] * aborts)
    sim.run(1)
    if aborts > 1:
        sim.abort("r")


@AGAIN
def test_a_request_that_was_not_seen_yet_ends_as_it_comes(sim, aborts):
    abort(sim, aborts)
    sim.run(3)
    submit(sim)
    finish(sim)
    assert (sim.answer("r").finished, sim.answer("r").ids) == ("abort", [])


@AGAIN
def test_one_that_arrives_in_the_same_round_never_reaches_the_plane(sim, aborts):
    submit(sim)
    abort(sim, aborts)
    assert sim.answer("r").finished == "abort"
    assert sim.plane.known == 1
    finish(sim)


@AGAIN
def test_one_that_waits_for_its_grammar_ends_and_its_grammar_finds_nobody(sim, compiler, aborts):
    submit(sim, grammar=KEY)
    sim.run(4)
    assert "r" in sim.frontend.live
    abort(sim, aborts)
    assert (sim.answer("r").finished, sim.answer("r").ids) == ("abort", [])
    compiler.known = Line((5, 6))
    finish(sim)


@AGAIN
def test_one_that_is_withheld_ends_at_once_and_is_not_submitted_on_resume(sim, aborts):
    sim.call(1, "pause_scheduler", "keep")
    submit(sim)
    sim.run(2)
    abort(sim, aborts)
    assert (sim.answer("r").finished, sim.answer("r").ids) == ("abort", [])
    sim.call(2, "resume_scheduler")
    finish(sim)
    assert not sim.scheduler.knows("r")


@AGAIN
def test_one_that_waits_for_a_row_ends_and_the_line_closes_up(aborts):
    sim = Simulation(small_specs(max_rows=1, eos_token_ids=(511,)), depth=1)
    sim.submit("other", OTHER, max_new_tokens=40, ignore_eos=True)
    submit(sim)
    sim.submit("behind", OTHER, max_new_tokens=2, ignore_eos=True)
    sim.run(3)
    abort(sim, aborts)
    assert (sim.answer("r").finished, sim.answer("r").ids) == ("abort", [])
    finish(sim)
    assert sim.answer("behind").finished == "length"


@AGAIN
def test_one_in_the_middle_of_its_prompt_ends_and_its_pages_come_back(sim, aborts):
    submit(sim)
    sim.run(2)
    told = sim.frontend.live["r"]
    assert (told.ids, sim.plane.known) == ([], 2), "it is being prefilled"
    abort(sim, aborts)
    assert (sim.answer("r").finished, sim.answer("r").ids) == ("abort", [])
    finish(sim)


@AGAIN
def test_one_whose_forward_is_in_flight_ends_with_what_was_told_and_no_more(sim, aborts):
    submit(sim)
    sim.run(10)
    before = list(sim.frontend.live["r"].ids)
    assert before
    abort(sim, aborts)
    told = sim.answer("r")
    assert told.finished == "abort"
    assert told.ids[: len(before)] == before
    assert told.completion_tokens == len(told.ids)
    finish(sim)
    assert sim.answer("r") is told


@AGAIN
def test_one_that_ended_is_over_and_the_next_of_its_name_is_another(sim, aborts):
    submit(sim, max_new_tokens=2)
    sim.run(12)
    assert sim.answer("r").finished == "length"
    abort(sim, aborts)
    sim.run(2)
    submit(sim, max_new_tokens=3)
    finish(sim, times=2)
    assert (sim.answer("r").finished, len(sim.answer("r").ids)) == ("length", 3)


@AGAIN
def test_one_that_is_suspended_ends_and_its_image_goes(aborts):
    sim = Simulation(
        small_specs(
            num_pages=65, num_snapshot_pages=65, max_retracted_requests=4, eos_token_ids=(511,)
        ),
        depth=1,
        force_retraction_interval=3,
    )
    sim.submit("other", OTHER, max_new_tokens=40, ignore_eos=True)
    sim.submit("r", OTHER[::-1], max_new_tokens=60, ignore_eos=True)
    for _ in range(60):
        sim.run(1)
        if "suspended until" in sim.scheduler.explain("r"):
            break
    else:
        pytest.fail("it was never suspended")
    abort(sim, aborts)
    assert sim.answer("r").finished == "abort"
    finish(sim)
