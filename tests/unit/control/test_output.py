import numpy as np
import pytest

from drumline.contract.plan import AbortReason, Batch, Bound, PlanAbort
from drumline.contract.request import GenerateRequest
from drumline.contract.result import ForwardResult, RowLogprobs
from drumline.control.output.crossings import MAX_REMEMBERED, REMEMBERED_US
from drumline.control.output.deadlines import Deadlines
from drumline.control.output.outputs import Outputs
from drumline.control.output.seats import HELD
from drumline.control.requests import Ending, Reason, Refusal, Request
from drumline.core.errors import InvariantError
from drumline.scheduler.events import Aborted, Finished, Results

EOS = 2


@pytest.fixture
def outputs():
    processor = Outputs(max_rows=8, vocab_size=100)
    yield processor
    processor.check()


def ints(*values):
    return np.array(values, np.int32)


def start(outputs, rid, row, *, generation=1, limit=100, stops=(EOS,), now_us=0, **fields):
    asked = GenerateRequest(rid=rid, **{"stream": True, **fields})
    request = Request(asked, prompt_tokens=5, limit=limit, stops=frozenset(stops), now_us=now_us)
    assert outputs.register(request, now_us)
    request.known_to_device = True
    outputs.bind(Bound(row, generation, rid), 3, now_us)
    return request


def decode(*rows, generations=None):
    return Batch(
        rows=ints(*rows),
        generations=ints(*(generations or [1] * len(rows))),
        input_lengths=ints(*[1] * len(rows)),
        prefix_lengths=ints(*[5] * len(rows)),
    )


def result(*tokens, counts=None, **fields):
    counts = ints(*(counts or [1] * len(tokens)))
    return ForwardResult(tokens=ints(*tokens), counts=counts, **fields)


def told(outcome):
    columns = outcome.columns
    return {
        rid: (ids, reason)
        for rid, ids, reason in zip(
            columns.rids, columns.output_ids, columns.finished_reasons, strict=True
        )
    }


def test_a_streamed_request_gets_each_token_as_it_comes(outputs):
    start(outputs, "a", 1)
    start(outputs, "b", 2)
    batch = decode(1, 2)
    for tokens in ((10, 20), (11, 21), (12, 22)):
        outputs.commit(batch, result(*tokens), 0)
        outcome = outputs.take()
        assert told(outcome) == {"a": ([tokens[0]], ""), "b": ([tokens[1]], "")}
        assert [type(event) for event in outcome.events] == [Results]
    assert outcome.columns.completion_tokens == [3, 3]
    assert outcome.columns.prompt_tokens == [5, 5]
    assert outcome.columns.cached_tokens == [3, 3]


def test_a_request_that_is_not_streamed_gets_all_tokens_at_its_end(outputs):
    start(outputs, "a", 1, stream=False, limit=3 * HELD)
    for i in range(3 * HELD - 1):
        outputs.commit(decode(1), result(3 + i % 90), 0)
        assert not outputs.take().columns
    outputs.commit(decode(1), result(7), 0)
    outcome = outputs.take()
    assert told(outcome) == {"a": ([3 + i % 90 for i in range(3 * HELD - 1)] + [7], "length")}
    assert outcome.columns.completion_tokens == [3 * HELD]


def test_a_stop_id_ends_its_request_and_is_its_last_token(outputs):
    start(outputs, "a", 1, stops=(EOS, 50))
    start(outputs, "b", 2)
    outputs.commit(decode(1, 2), result(50, 50), 0)
    outcome = outputs.take()
    assert told(outcome) == {"a": ([50], "stop"), "b": ([50], "")}
    assert outcome.columns.details[outcome.columns.rids.index("a")] == {
        "type": "stop",
        "matched": 50,
    }
    assert outcome.events[-1] == Finished("a")
    assert outcome.released == ["a"]
    assert [end.request.rid for end in outcome.ended] == ["a"]


def test_a_stop_id_before_the_least_number_of_tokens_does_not_stop(outputs):
    start(outputs, "a", 1, min_new_tokens=2)
    for token, reason in ((EOS, ""), (EOS, ""), (EOS, "stop")):
        outputs.commit(decode(1), result(token), 0)
        assert told(outputs.take()) == {"a": ([token], reason)}


def test_a_request_ends_at_its_length(outputs):
    start(outputs, "a", 1, limit=2)
    outputs.commit(decode(1), result(10), 0)
    assert told(outputs.take()) == {"a": ([10], "")}
    outputs.commit(decode(1), result(11), 0)
    assert told(outputs.take()) == {"a": ([11], "length")}


def test_results_of_an_ended_request_that_were_in_flight_are_void(outputs):
    start(outputs, "a", 1, limit=1)
    start(outputs, "b", 2)
    outputs.commit(decode(1, 2), result(10, 20), 0)
    outputs.take()
    outputs.commit(decode(1, 2), result(11, 21), 0)
    outcome = outputs.take()
    assert told(outcome) == {"b": ([21], "")}
    assert list(outcome.events[0].tokens) == [11, 21], "the scheduler still counts them"


def test_results_of_a_rows_previous_owner_do_not_reach_the_next(outputs):
    start(outputs, "a", 1)
    outputs.abort("a", 0)
    start(outputs, "b", 1, generation=2)
    outputs.take()
    outputs.commit(decode(1, generations=[1]), result(10), 0)
    assert not outputs.take().columns
    outputs.commit(decode(1, generations=[2]), result(20), 0)
    assert told(outputs.take()) == {"b": ([20], "")}


def test_a_prefill_chunk_short_of_its_end_says_nothing(outputs):
    start(outputs, "a", 1)
    start(outputs, "b", 2)
    outputs.commit(decode(1, 2), result(20, counts=[0, 1]), 0)
    assert told(outputs.take()) == {"b": ([20], "")}


def test_several_tokens_of_a_row_end_at_its_stop(outputs):
    start(outputs, "a", 1)
    start(outputs, "b", 2)
    outputs.commit(decode(1, 2), result(10, EOS, 11, 20, counts=[3, 1]), 0)
    outcome = outputs.take()
    assert told(outcome) == {"a": ([10, EOS], "stop"), "b": ([20], "")}
    assert outcome.ended[0].produced == 2


def test_a_row_that_is_not_finite_aborts_before_its_results_count(outputs):
    start(outputs, "a", 1)
    start(outputs, "b", 2)
    outputs.commit(decode(1, 2), result(10, 20, nan_indices=ints(0)), 0)
    outcome = outputs.take()
    assert told(outcome) == {"a": ([], "abort"), "b": ([20], "")}
    assert outcome.columns.details[0]["err_type"] == 523
    assert [type(event) for event in outcome.events] == [Aborted, Results]
    assert outcome.released == ["a"]


def test_an_abort_ends_a_request_once_and_tells_what_was_held(outputs):
    start(outputs, "a", 1, stream=False)
    for token in (10, 11, 12):
        outputs.commit(decode(1), result(token), 0)
    outputs.take()
    outputs.abort("a", 0)
    outputs.abort("a", 0)
    outcome = outputs.take()
    assert told(outcome) == {"a": ([10, 11, 12], "abort")}
    assert outcome.events == [Aborted("a")]
    assert outcome.columns.completion_tokens == [3]


def test_an_abort_ahead_of_its_request_waits_for_it_until_it_expires(outputs):
    outputs.abort("a", 0)
    outputs.abort("b", 10)
    outputs.expire(REMEMBERED_US)
    asked = [GenerateRequest(rid=rid) for rid in "ab"]
    a, b = (Request(each, prompt_tokens=1, limit=1, stops=frozenset(), now_us=0) for each in asked)
    assert outputs.register(a, 0)
    assert not outputs.register(b, 0)
    outcome = outputs.take()
    assert told(outcome) == {"b": ([], "abort")}
    assert outcome.released == [], "the data plane never heard of it"
    assert not outputs.holds("b")


def test_an_abort_that_crossed_its_requests_end_spares_the_next_of_that_id(outputs):
    start(outputs, "a", 1, limit=1)
    outputs.commit(decode(1), result(10), 0)
    outputs.refuse(Refusal("b", 9, Ending(Reason.ABORT, "no such id", 400)))
    outputs.take()
    outputs.abort("a", 0)
    outputs.abort("b", 0)
    outputs.expire(REMEMBERED_US - 1)
    asked = [GenerateRequest(rid=rid) for rid in "ab"]
    later = [Request(e, prompt_tokens=1, limit=1, stops=frozenset(), now_us=0) for e in asked]
    assert all(outputs.register(request, 0) for request in later)


def test_ended_ids_are_forgotten_with_time_and_number(outputs):
    for number in range(MAX_REMEMBERED + 10):
        outputs.refuse(Refusal(f"r{number}", 9, Ending(Reason.ABORT, "no such id", 400)))
    outputs.take()
    outputs.abort("r0", 0)
    asked = GenerateRequest(rid="r0")
    first = Request(asked, prompt_tokens=1, limit=1, stops=frozenset(), now_us=0)
    assert not outputs.register(first, 0), "too many ended since"
    outputs.expire(REMEMBERED_US)
    outputs.abort("r99", REMEMBERED_US)
    asked = GenerateRequest(rid="r99")
    last = Request(asked, prompt_tokens=1, limit=1, stops=frozenset(), now_us=0)
    assert not outputs.register(last, REMEMBERED_US), "it ended too long ago"


def test_a_refusal_is_answered_as_a_finished_abort(outputs):
    outputs.refuse(Refusal("a", 9, Ending(Reason.ABORT, "no such id", 400)))
    columns = outputs.take().columns
    assert (columns.rids, columns.finished_reasons) == (["a"], ["abort"])
    assert columns.details == [{"type": "abort", "message": "no such id", "status_code": 400}]


def test_a_plans_abort_ends_toward_the_client_alone(outputs):
    start(outputs, "a", 1)
    outputs.finish_plan_aborts([PlanAbort("a", AbortReason.OUT_OF_PAGES, "3 of 5 pages")], 0)
    outcome = outputs.take()
    assert outcome.events == []
    assert outcome.columns.details[0]["message"] == "out_of_pages: 3 of 5 pages"
    assert outcome.columns.details[0]["status_code"] == 503
    assert outcome.released == ["a"]


def test_a_request_that_moves_to_another_row_keeps_its_count(outputs):
    start(outputs, "a", 1, limit=4, stream=False)
    outputs.commit(decode(1), result(10), 0)
    outputs.commit(decode(1), result(11), 0)
    outputs.bind(Bound(3, 7, "a"), 0, 0)
    outputs.commit(decode(3, generations=[7]), result(12), 0)
    outputs.commit(decode(3, generations=[7]), result(13), 0)
    assert told(outputs.take()) == {"a": ([10, 11, 12, 13], "length")}


def test_log_probabilities_reach_the_client_beside_their_ids(outputs):
    start(outputs, "a", 1, return_logprob=True, top_logprobs=2)
    start(outputs, "b", 2)
    batch = decode(1, 2)
    plan = outputs.logprob_plan(batch)
    assert (list(plan.indices), list(plan.top)) == ([0], [2])
    for token in (10, 11):
        entry = RowLogprobs(0, (-0.25,), ((-0.25, -1.0),), ((token, 9),))
        outputs.commit(batch, result(token, 20, logprobs=(entry,)), 0)
        columns = outputs.take().columns
        at = columns.rids.index("a")
        assert columns.logprobs[at] == [-0.25]
        assert columns.logprob_ids[at] == [token]
        assert columns.top_logprobs[at] == [[-0.25, -1.0]]
        assert columns.top_logprob_ids[at] == [[token, 9]]
        assert columns.logprobs[columns.rids.index("b")] == []


def test_log_probabilities_are_asked_of_sampling_rows_only(outputs):
    start(outputs, "a", 1, return_logprob=True)
    batch = Batch(
        rows=ints(1),
        generations=ints(1),
        input_lengths=ints(3),
        prefix_lengths=ints(0),
        extends=1,
        extend_ids=ints(1, 2, 3),
        prompt_lengths=ints(5),
    )
    assert outputs.logprob_plan(batch) is None
    outputs.abort("a", 0)
    outputs.take()
    assert outputs.logprob_plan(batch) is None


def test_a_result_that_does_not_fit_its_batch_is_an_invariant_error(outputs):
    start(outputs, "a", 1)
    with pytest.raises(InvariantError, match="2 counts"):
        outputs.commit(decode(1), result(10, 11), 0)
    with pytest.raises(InvariantError, match="1 tokens for counts of 2"):
        outputs.commit(decode(1), result(10, counts=[2]), 0)


def test_every_column_has_one_entry_a_request_whatever_mix_a_round_brings(outputs):
    start(outputs, "a", 1)
    start(outputs, "b", 2, stream=False)
    start(outputs, "c", 3, limit=2)
    for tokens in ((10, 20, 30), (11, 21, 31), (EOS, 22, 0)):
        outputs.commit(decode(1, 2, 3), result(*tokens), 0)
        outputs.abort("unknown", 0)
        columns = outputs.take().columns
        names = set(type(columns).__struct_fields__) - {"prompts"}
        lengths = {len(getattr(columns, name)) for name in names}
        assert len(lengths) == 1


def test_deadlines_that_are_far_away_keep_nothing_of_requests_that_ended():
    deadlines = Deadlines()
    deadlines.add("kept", 9_000_000)
    for number in range(500):
        deadlines.add(f"{number}", 10**15)
        deadlines.ended(f"{number}")
        assert len(deadlines) < 50
    assert deadlines.late(8_999_999) == []
    assert deadlines.late(9_000_000) == ["kept"]


def test_a_request_is_not_late_by_the_deadline_of_who_had_its_id_before(outputs):
    start(outputs, "a", 1, deadline_us=1_000)
    outputs.abort("a", 0)
    start(outputs, "a", 2, deadline_us=2_000)
    outputs.take()
    outputs.expire(1_999)
    assert not outputs.take().ended
    outputs.expire(2_000)
    assert told(outputs.take()) == {"a": ([], "abort")}
    outputs.expire(3_000)
    assert not outputs.take().ended
