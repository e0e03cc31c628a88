"""Requests that wait for grammars, in whole rounds on the fake plane."""

import pytest
from tests.fakes.grammars import EOS, Line

from drumline.collective.in_process import run_ranks
from drumline.contract.grammar import Compiling, GrammarFailure, GrammarKey, GrammarKind
from drumline.contract.request import Admission, GenerateRequest
from drumline.control.grammars import Grammars
from drumline.control.requests import Admitted, Request
from drumline.replay.simulator import Simulation
from drumline.scheduler.events import RequestSpec

PROMPT = list(range(1, 14))
KEY = GrammarKey(GrammarKind.REGEX, "abc")
IDS = (7, 300, 9)


class Compiler:
    """Knows of each grammar what a test says."""

    def __init__(self):
        self.states = {}
        self.asked = []

    def request(self, key):
        self.asked.append(key)
        return self.state(key)

    def state(self, key):
        return self.states.get(key, Compiling())


@pytest.fixture
def compiler():
    return Compiler()


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def sim(request, compiler):
    simulation = Simulation(depth=request.param, encoded=True, grammars=compiler, lag=lambda: 1)
    yield simulation
    simulation.run_until_idle()
    simulation.check_drained()


def test_a_request_waits_for_its_grammar_and_others_do_not(sim, compiler):
    sim.submit("held", PROMPT, max_new_tokens=9, grammar=KEY, ignore_eos=True)
    sim.submit("free", PROMPT, max_new_tokens=3, ignore_eos=True)
    sim.run(20)
    assert sim.answer("free").finished == "length"
    assert "held" in sim.frontend.live
    compiler.states[KEY] = Line(IDS)
    sim.run_until_idle()
    told = sim.answer("held")
    assert told.ids == [*IDS, EOS]
    assert (told.finished, told.details) == ("stop", {"type": "stop", "matched": EOS})


def test_a_grammar_that_is_ready_holds_nobody_up(sim, compiler):
    compiler.states[KEY] = Line(IDS)
    sim.submit("a", PROMPT, grammar=KEY)
    sim.submit("b", list(range(1, 60)), grammar=KEY)
    sim.run_until_idle()
    # The second is prefilled in chunks, of which only the last draws a token.
    assert sim.answer("a").ids == sim.answer("b").ids == [*IDS, EOS]


def test_an_answer_may_be_cut_short_by_its_length(sim, compiler):
    compiler.states[KEY] = Line(IDS)
    sim.submit("a", PROMPT, grammar=KEY, max_new_tokens=2)
    sim.run_until_idle()
    assert (sim.answer("a").finished, sim.answer("a").ids) == ("length", list(IDS[:2]))


def test_only_a_grammar_that_never_compiles_is_its_clients_fault(sim, compiler):
    other = GrammarKey(GrammarKind.REGEX, "slow")
    compiler.states[KEY] = GrammarFailure("the keyword not is not supported", permanent=True)
    third = GrammarKey(GrammarKind.REGEX, "crowded")
    compiler.states[other] = GrammarFailure("it did not compile within 10 s", permanent=False)
    compiler.states[third] = GrammarFailure("others were first", permanent=False, busy=True)
    sim.submit("wrong", PROMPT, grammar=KEY)
    sim.submit("late", PROMPT, grammar=other)
    sim.submit("crowded", PROMPT, grammar=third)
    sim.run_until_idle()
    wrong, late = sim.answer("wrong").details, sim.answer("late").details
    assert sim.answer("crowded").details["status_code"] == 503
    assert wrong["status_code"] == 400
    assert "the keyword not is not supported" in wrong["message"]
    assert "status_code" not in late
    assert "did not compile within 10 s" in late["message"]


def test_an_abort_ends_a_request_that_waits(sim, compiler):
    sim.submit("a", PROMPT, grammar=KEY)
    sim.run(2)
    sim.abort("a")
    sim.run(2)
    assert sim.answer("a").finished == "abort"
    compiler.states[KEY] = Line(IDS)
    sim.run_until_idle()


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_drain_ends_who_still_waits(sim, compiler, mode):
    sim.submit("a", PROMPT, grammar=KEY)
    sim.run(2)
    sim.call(1, "pause_scheduler", mode)
    sim.run(3)
    assert sim.answer("a").finished == "abort"
    assert [reply.success for reply in sim.frontend.replies] == [True]
    sim.call(2, "resume_scheduler")


def test_a_request_whose_grammar_is_ready_is_withheld_while_the_engine_is_paused(sim, compiler):
    sim.call(1, "pause_scheduler", "keep")
    sim.submit("a", PROMPT, grammar=KEY)
    sim.run(2)
    compiler.states[KEY] = Line(IDS)
    sim.run(3)
    assert "a" in sim.frontend.live
    sim.call(2, "resume_scheduler")
    sim.run_until_idle()
    assert sim.answer("a").ids == [*IDS, EOS]


def test_a_grammar_needs_a_library_and_decides_its_own_end(sim):
    sim.submit("a", PROMPT, grammar=KEY, min_new_tokens=3, max_new_tokens=5)
    bare = Simulation()
    bare.submit("b", PROMPT, grammar=KEY)
    bare.run_until_idle()
    assert "--grammar-backend" in bare.answer("b").details["message"]
    sim.run_until_idle()
    assert "min_new_tokens beside a grammar" in sim.answer("a").details["message"]


def waiting(rid):
    asked = GenerateRequest(rid=rid, grammar=KEY)
    request = Request(asked, prompt_tokens=1, limit=9, stops=frozenset(), now_us=0)
    admission = Admission(rid=rid, prompt_tokens=1, sampling=asked.sampling)
    return Admitted(
        request, admission, RequestSpec(rid=rid, tokens=asked.input_ids, max_new_tokens=9)
    )


@pytest.mark.parametrize("seed", range(5))
def test_ranks_let_a_request_go_on_in_the_round_in_which_all_have_its_grammar(seed):
    def run(mesh):
        compiler = Compiler()
        queue = Grammars(compiler, mesh.group(range(3)))
        assert queue.hold([waiting("a")]) == []
        for round_ in range(5):
            if round_ == mesh.index + 1:
                compiler.states[KEY] = Line(IDS)
            drained = queue.drain(lambda _request: True)
            assert not drained.failed
            if drained.ready:
                return round_
        return None

    assert run_ranks(3, run, seed) == [3, 3, 3]


def test_a_grammar_that_one_rank_forgot_meanwhile_is_still_there_for_who_waited():
    def run(mesh):
        compiler = Compiler()
        queue = Grammars(compiler, mesh.group(range(2)))
        queue.hold([waiting("a")])
        if mesh.index == 0:
            compiler.states[KEY] = Line(IDS)
        assert not queue.drain(lambda _request: True).ready
        compiler.states = {} if mesh.index == 0 else {KEY: Line(IDS)}
        return len(queue.drain(lambda _request: True).ready)

    assert run_ranks(2, run) == [1, 1]


def test_a_grammar_that_fails_on_one_rank_fails_on_all_with_the_first_members_reason():
    def run(mesh):
        compiler = Compiler()
        queue = Grammars(compiler, mesh.group(range(3)))
        queue.hold([waiting("a"), waiting("b")])
        if mesh.index:
            compiler.states[KEY] = GrammarFailure(f"of rank {mesh.index}", permanent=False)
        drained = queue.drain(lambda request: request.rid == "b")
        assert queue.waiting == 0
        return [(request.rid, ending.message) for request, ending in drained.failed]

    said = [("b", "the regex grammar cannot be used: of rank 1")]
    assert run_ranks(3, run) == [said] * 3
