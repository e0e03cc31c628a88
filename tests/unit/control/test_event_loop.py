import gc
import logging

import pytest

from drumline.contract.messages import CallReply
from drumline.contract.outputs import Load
from drumline.control.load_report import HEARTBEAT_US
from drumline.control.output.crossings import REMEMBERED_US
from drumline.control.requests import Admitted
from drumline.core.errors import InvariantError
from drumline.replay.simulator import Simulation, small_specs
from drumline.scheduler.scheduler import Scheduler

PROMPT = list(range(1, 14))


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def sim(request):
    simulation = Simulation(depth=request.param, encoded=True)
    yield simulation
    simulation.run_until_idle()
    simulation.check_drained()


def test_a_request_is_answered_and_everything_is_given_back(sim):
    sim.submit("a", PROMPT, max_new_tokens=5, ignore_eos=True)
    sim.run_until_idle()
    told = sim.answer("a")
    assert (len(told.ids), told.finished, told.prompt_tokens) == (5, "length", 13)


def test_a_streamed_answer_comes_a_token_a_frame_and_a_whole_one_in_one(sim):
    sim.submit("a", PROMPT, max_new_tokens=5, ignore_eos=True)
    sim.submit("b", PROMPT, max_new_tokens=5, ignore_eos=True, stream=False)
    sim.run_until_idle()
    assert (sim.answer("a").frames, sim.answer("b").frames) == (5, 1)
    assert sim.answer("a").ids == sim.answer("b").ids


def test_a_bad_request_is_answered_and_disturbs_nobody(sim):
    sim.submit("good", PROMPT, max_new_tokens=3, ignore_eos=True)
    sim.submit("bad", [9999], max_new_tokens=3)
    sim.run_until_idle()
    told = sim.answer("bad")
    assert (told.finished, told.details["status_code"]) == ("abort", 400)
    assert "9999" in told.details["message"]
    assert len(sim.answer("good").ids) == 3


def test_a_repeated_id_is_dropped_with_a_warning_and_the_original_keeps_its_stream(sim, caplog):
    caplog.set_level(logging.WARNING)
    sim.submit("a", PROMPT, max_new_tokens=4, ignore_eos=True)
    sim.submit("a", [7, 8], max_new_tokens=9, ignore_eos=True)
    sim.run(1)
    sim.submit("a", [9], max_new_tokens=9, ignore_eos=True)
    sim.run_until_idle()
    assert [rid for rid, _ in sim.frontend.over] == ["a"]
    assert sim.answer("a").prompt_tokens == 13
    assert len(sim.answer("a").ids) == 4
    assert caplog.text.count("'a' repeats the id of a live one") == 2


def test_an_id_that_the_scheduler_still_holds_is_refused_with_a_conflict(sim):
    sim.submit("a", PROMPT, max_new_tokens=50, ignore_eos=True)
    sim.run(2)
    sim.abort("a")
    sim.submit("a", PROMPT, max_new_tokens=2, ignore_eos=True)
    # The frontend's record of the first ends with the abort, in the same frame.
    with pytest.raises(InvariantError, match="over or was never submitted"):
        sim.run(1)
    sim.frontend.live.clear()
    sim.run_until_idle()


def test_an_id_is_free_again_once_both_owners_let_go(sim):
    for _ in range(3):
        sim.submit("a", PROMPT, max_new_tokens=2, ignore_eos=True)
        sim.run_until_idle()
        sim.run(1)  # the plan that forgets it
    assert [len(told.ids) for _, told in sim.frontend.over] == [2, 2, 2]


def test_a_client_that_leaves_ends_its_request_in_the_round_its_abort_arrives(sim):
    sim.submit("a", PROMPT, max_new_tokens=50, ignore_eos=True)
    sim.run(4)
    sim.abort("a")
    sim.run(1)
    assert sim.answer("a").finished == "abort"
    sim.run(2)
    assert sim.scheduler.active_pages() == 0
    assert sim.plane.known == 0


def test_an_abort_may_overtake_its_request(sim):
    sim.abort("a")
    sim.run(3)
    sim.submit("a", PROMPT)
    sim.run_until_idle()
    assert (sim.answer("a").finished, sim.answer("a").ids) == ("abort", [])


def test_an_abort_that_nobody_came_for_expires_by_the_relayed_clock(sim):
    sim.abort("a")
    sim.run(1)
    sim.clock.advance(REMEMBERED_US)
    sim.run(1)
    sim.submit("a", PROMPT, max_new_tokens=2, ignore_eos=True)
    sim.run_until_idle()
    assert sim.answer("a").finished == "length"


def test_a_request_aborted_in_the_round_it_arrives_never_reaches_the_plane(sim):
    sim.submit("a", PROMPT)
    sim.abort("a")
    sim.run(1)
    assert sim.answer("a").finished == "abort"
    assert sim.plane.known == 0


def test_a_batch_the_scheduler_refuses_ends_its_own_requests_only(sim, monkeypatch):
    sim.submit("runs", PROMPT, max_new_tokens=6, ignore_eos=True)
    sim.run(2)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "submit", lambda self, specs: "duplicate request id")
        sim.submit("a", PROMPT)
        sim.submit("b", PROMPT)
        sim.run(1)
    sim.run_until_idle()
    for rid in "ab":
        assert sim.answer(rid).details == {
            "type": "abort",
            "message": "duplicate request id",
            "status_code": 400,
        }
    assert len(sim.answer("runs").ids) == 6


def test_a_request_beyond_the_queues_limit_is_answered_429_with_the_numbers():
    sim = Simulation(max_queued_requests=1)
    rows = sim.specs.max_rows
    for number in range(rows + 3):
        sim.submit(f"r{number}", PROMPT, max_new_tokens=3, ignore_eos=True)
    sim.run_until_idle()
    for number in range(rows + 1):
        assert len(sim.answer(f"r{number}").ids) == 3
    for number in (rows + 1, rows + 2):
        told = sim.answer(f"r{number}")
        assert (told.finished, told.ids, told.details["status_code"]) == ("abort", [], 429)
        assert "the queue's limit of 1 requests" in told.details["message"]
    sim.submit("later", PROMPT, max_new_tokens=3)
    sim.run_until_idle()
    assert sim.answer("later").finished != "abort"


def test_logits_that_are_not_finite_end_their_request_alone():
    sim = Simulation(depth=1, faulty=frozenset({"bad"}))
    sim.submit("bad", PROMPT, max_new_tokens=5)
    sim.submit("good", PROMPT[:5], max_new_tokens=5, ignore_eos=True)
    sim.run_until_idle()
    assert sim.answer("bad").details["err_type"] == 523
    assert (sim.answer("bad").ids, len(sim.answer("good").ids)) == ([], 5)
    sim.check_drained()


def test_log_probabilities_arrive_beside_the_ids(sim):
    sim.submit("a", PROMPT, max_new_tokens=4, ignore_eos=True, top_logprobs=2)
    sim.submit("b", PROMPT, max_new_tokens=4, ignore_eos=True)
    sim.run_until_idle()
    told = sim.answer("a")
    assert told.logprobs == [-0.5] * 4
    assert told.top_ids == [[token, token + 1] for token in told.ids]
    assert sim.answer("b").logprobs == []


def test_an_idle_engine_waits_and_a_busy_one_does_not(sim):
    before = sim.clock.now_us()
    sim.run(1)
    assert sim.clock.now_us() - before > 10_000
    sim.submit("a", PROMPT, max_new_tokens=8, ignore_eos=True)
    sim.run(1)
    before = sim.clock.now_us()
    sim.run(3)
    assert sim.clock.now_us() - before == 3_000


def test_an_engine_with_a_forward_in_flight_is_not_idle():
    sim = Simulation(depth=1)
    sim.submit("a", PROMPT, max_new_tokens=50, ignore_eos=True)
    sim.run(3)
    sim.abort("a")
    sim.run(1)
    before = sim.clock.now_us()
    sim.run(1)
    assert sim.clock.now_us() - before == 1_000, "its last forward was not waited for"
    sim.run_until_idle()
    sim.check_drained()


def test_a_frozen_engine_keeps_what_runs_and_goes_on_where_it_was(sim):
    free = Simulation()
    for each in (sim, free):
        each.submit("a", PROMPT, max_new_tokens=9, ignore_eos=True)
        each.run(3)
    sim.call(1, "pause_scheduler", "keep")
    sim.submit("b", PROMPT, max_new_tokens=2, ignore_eos=True)
    sim.run(1)
    told = len(sim.frontend.live["a"].ids)
    before = sim.clock.now_us()
    sim.run(5)
    assert sim.clock.now_us() - before > 50_000, "a frozen engine waits for messages"
    assert len(sim.frontend.live["a"].ids) == told
    assert sim.frontend.live["b"].frames == 0
    sim.call(2, "resume_scheduler")
    sim.run_until_idle()
    free.run_until_idle()
    assert sim.answer("a").ids == free.answer("a").ids
    assert len(sim.answer("b").ids) == 2
    assert [(r.call_id, r.success) for r in sim.frontend.replies] == [(1, True), (2, True)]


def test_a_waiting_pause_is_answered_after_what_ran_and_withholds_what_came_after(sim):
    sim.submit("a", PROMPT, max_new_tokens=4, ignore_eos=True)
    sim.call(1, "pause_scheduler", "wait")
    sim.submit("b", PROMPT, max_new_tokens=4, ignore_eos=True)
    sim.run(1)
    assert sim.frontend.replies == []
    sim.run(12)
    assert sim.frontend.replies == [CallReply(1, True)]
    assert sim.answer("a").finished == "length"
    sim.abort("b")
    sim.submit("c", PROMPT, max_new_tokens=1)
    sim.run(2)
    assert sim.answer("b").finished == "abort"
    assert sim.frontend.live["c"].frames == 0
    sim.call(2, "resume_scheduler")
    sim.run_until_idle()
    assert sim.answer("c").finished


def test_an_aborting_pause_ends_what_runs_but_not_what_came_after(sim):
    sim.submit("a", PROMPT, max_new_tokens=40, ignore_eos=True)
    sim.run(3)
    sim.call(1, "pause_scheduler", "abort")
    sim.submit("b", PROMPT, max_new_tokens=2, ignore_eos=True)
    sim.run(5)
    assert sim.answer("a").finished == "abort"
    assert "paused" in sim.answer("a").details["message"]
    assert sim.frontend.replies == [CallReply(1, True)]
    sim.call(2, "resume_scheduler")
    sim.run_until_idle()
    assert len(sim.answer("b").ids) == 2


def test_requests_that_are_withheld_and_aborted_are_not_kept(sim):
    sim.call(1, "pause_scheduler", "keep")
    sim.submit("kept", PROMPT, max_new_tokens=2, ignore_eos=True)
    for number in range(200):
        sim.submit(f"{number}", PROMPT, max_new_tokens=2)
        sim.run(1)
        sim.abort(f"{number}")
    sim.run(1)
    gc.collect()
    assert sum(type(each) is Admitted for each in gc.get_objects()) < 50
    sim.call(2, "resume_scheduler")
    sim.run_until_idle()
    assert len(sim.answer("kept").ids) == 2


def test_an_id_used_again_while_withheld_is_admitted_once(sim):
    sim.call(1, "pause_scheduler", "keep")
    sim.submit("a", PROMPT, max_new_tokens=2, ignore_eos=True)
    sim.run(1)
    sim.abort("a")
    sim.run(1)
    sim.submit("a", PROMPT[:3], max_new_tokens=3, ignore_eos=True)
    sim.run(1)
    sim.call(2, "resume_scheduler")
    sim.run_until_idle()
    assert [(told.prompt_tokens, told.finished) for _, told in sim.frontend.over] == [
        (13, "abort"),
        (3, "length"),
    ]


def test_an_idle_engine_reports_its_load_at_start_and_once_a_second(sim):
    sim.run(1)
    assert [load for _, load in sim.frontend.loads] == [Load(0, 0, 0, 64)]
    start = sim.clock.now_us()
    sim.run(500)
    seconds = (sim.clock.now_us() - start) / HEARTBEAT_US
    assert len(sim.frontend.loads) - 1 == pytest.approx(seconds, abs=1)


def test_a_load_that_changes_without_outputs_is_told_at_once(sim):
    sim.submit("a", list(range(1, 100)), max_new_tokens=4, stream=False)
    sim.run(1)
    sim.abort("a")
    sim.run(3)
    running = [load.num_running for _, load in sim.frontend.loads]
    assert running[-1] == 0
    assert 1 in running


def test_the_round_without_a_forward_commits_what_is_in_flight():
    sim = Simulation(depth=1)
    sim.submit("a", PROMPT, max_new_tokens=1)
    sim.run(2)
    assert sim.answer("a").finished, "nothing follows the only forward, so it is not waited for"
    sim.run_until_idle()
    sim.check_drained()


def test_flush_cache_drops_prefixes_and_unknown_calls_are_answered(sim):
    sim.submit("a", PROMPT, max_new_tokens=8, ignore_eos=True)
    sim.run_until_idle()
    sim.call(1, "flush_cache", 0.0)
    sim.call(2, "levitate")
    sim.run(1)
    assert CallReply(1, True) in sim.frontend.replies
    assert not next(r for r in sim.frontend.replies if r.call_id == 2).success
    sim.submit("b", PROMPT, max_new_tokens=2, ignore_eos=True)
    sim.run_until_idle()
    assert sim.answer("b").cached_tokens == 0


def test_a_stop_request_and_a_lost_frontend_end_the_run(sim):
    assert sim.loop.round(True)
    assert not sim.loop.round(False)
    sim.frontend.closed = True
    assert sim.loop.round(False)
    sim.frontend.closed = False


def test_a_broken_invariant_comes_with_the_last_rounds(sim, monkeypatch):
    class Never:
        def is_set(self):
            return False

    def broken(scheduler):
        raise InvariantError("page 7 has two owners")

    sim.run(3)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "plan", broken)
        with pytest.raises(InvariantError) as caught:
            sim.loop.run(Never())
    assert "RoundRecord" in caught.value.__notes__[0]


def test_a_finished_request_and_its_batches_are_logged(caplog):
    caplog.set_level(logging.INFO)
    sim = Simulation(small_specs(), depth=1)
    sim.submit("a", PROMPT, max_new_tokens=60, ignore_eos=True)
    sim.run_until_idle()
    lines = [record.getMessage() for record in caplog.records]
    assert any(
        line.startswith(
            "Prefill batch. #dp-rank: 0, #new-seq: 1, #new-token: 13, #cached-token: 0, "
            "#running-req: 1, #queue-req: 0"
        )
        for line in lines
    )
    assert any(line.startswith("Decode batch. #dp-rank: 0, #running-req: 1, ") for line in lines)
    assert any(
        line.startswith("Req: a Finish! RequestStats(status=OK, reason=length, prompt_tokens=13, ")
        for line in lines
    )


def test_the_time_a_forward_takes_is_told_as_the_requests_time(sim, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    complete = sim.plane.complete

    def slowly(ticket):
        sim.clock.advance(50_000)
        return complete(ticket)

    monkeypatch.setattr(sim.plane, "complete", slowly)
    sim.submit("a", PROMPT, max_new_tokens=1, ignore_eos=True)
    sim.run_until_idle()
    (line,) = [line for line in caplog.messages if line.startswith("Req: a ")]
    for name in ("prefill_ms", "ttft_ms", "total_ms"):
        told = float(line.split(f"{name}=")[1].split(",")[0])
        assert told >= 50, line


def test_a_prompt_is_told_of_once_and_whole_however_it_was_cut(sim):
    long = list(range(1, 101))
    sim.submit("whole", long, max_new_tokens=3, ignore_eos=True, prompt_logprobs_from=0)
    sim.submit("rest", long, max_new_tokens=3, ignore_eos=True, prompt_logprobs_from=40)
    sim.submit("last", PROMPT, max_new_tokens=3, ignore_eos=True, prompt_logprobs_from=12)
    sim.submit("held", PROMPT, max_new_tokens=3, prompt_logprobs_from=3, stream=False)
    sim.submit("gone", long, max_new_tokens=3, prompt_logprobs_from=3)
    sim.submit("none", long, max_new_tokens=3, ignore_eos=True, top_logprobs=1)
    sim.run(2)
    sim.abort("gone")
    sim.run_until_idle()
    for rid, prompt, start in (
        ("whole", long, 0),
        ("rest", long, 40),
        ("last", PROMPT, 12),
        ("held", PROMPT, 3),
    ):
        told = sim.answer(rid).prompt
        assert told.ids == prompt[start:]
        assert told.logprobs == [None, *(-float(token) for token in prompt[start + 1 :])]
    assert sim.answer("gone").prompt is sim.answer("none").prompt is None


def test_a_deadline_ends_who_runs_and_who_waits_and_nobody_else(sim):
    for which in range(12):  # more than there are rows
        late = 20_500 if which % 2 else 0
        sim.submit(f"{which}", PROMPT, max_new_tokens=60, ignore_eos=True, deadline_us=late)
    sim.run_until_idle()
    for which in range(12):
        told = sim.answer(f"{which}")
        assert told.finished == ("abort" if which % 2 else "length")
        if which % 2:
            assert told.details["status_code"] == 408
            assert len(told.ids) < 25
