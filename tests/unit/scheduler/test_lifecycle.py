"""The life of a request, from its submission to the plan that forgets it."""

import numpy as np
import pytest
from scheduler_rig import Rig, results_of, spec

from drumline.scheduler.events import IllegalTransitionError, Results, Sizes


def test_a_submitted_request_waits():
    rig = Rig()
    assert rig.submit("a", 6) is None
    assert rig.scheduler.sizes() == Sizes(waiting=1, prefilling=0, decoding=0, finishing=0)


def test_the_first_plan_prefills():
    rig = Rig()
    rig.submit("a", 6)
    batch = rig.plan().batch
    assert (batch.extends, batch.extend_ids.tolist()) == (1, [0, 1, 2, 3, 4, 5])
    assert batch.prompt_lengths.tolist() == [6]
    assert rig.scheduler.sizes().prefilling == 1


def test_the_plan_after_the_prompt_decodes():
    rig = Rig()
    rig.submit("a", 6)
    rig.round()
    batch = rig.plan().batch
    assert (batch.extends, batch.input_lengths.tolist(), batch.prefix_lengths.tolist()) == (
        0,
        [1],
        [6],
    )
    assert rig.scheduler.sizes().decoding == 1


def test_a_finished_request_is_forgotten_by_the_next_plan():
    rig = Rig()
    rig.submit("a", 6)
    rig.round()
    rig.finish("a")
    assert rig.scheduler.knows("a")
    assert rig.submit("a", 6) == "request a: the id is taken by a live request"
    rig.plan()
    assert rig.scheduler.token_size("a") == -1
    assert rig.submit("a", 6) is None


def test_a_result_lengthens_the_request():
    rig = Rig()
    rig.submit("a", 6)
    rig.round()
    assert rig.scheduler.token_size("a") == 7
    rig.round()
    assert rig.scheduler.token_size("a") == 8


def test_finishing_what_was_not_started_is_illegal_and_changes_nothing():
    rig = Rig()
    rig.submit("a", 6)
    with pytest.raises(IllegalTransitionError, match="FINISH is illegal in state SUBMITTED"):
        rig.finish("a")
    rig.scheduler.check()
    assert rig.scheduler.sizes().waiting == 1


def test_results_nobody_owes_are_illegal_and_change_nothing():
    rig = Rig()
    rig.submit("a", 6)
    batch = rig.plan().batch
    rig.commit()
    with pytest.raises(IllegalTransitionError, match="no planned forward owes"):
        rig.scheduler.advance([results_of(batch)])
    assert rig.scheduler.token_size("a") == 7


def test_a_duplicate_id_refuses_the_whole_batch():
    rig = Rig()
    assert rig.scheduler.submit([spec("a", 4), spec("b", 4), spec("a", 4)]) is not None
    assert rig.scheduler.sizes().waiting == 0


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (spec("a", 0), "the prompt is empty"),
        (spec("a", 4, max_new_tokens=-1), "max_new_tokens is -1"),
        (spec("a", 4, max_cached_prefix_tokens=-1), "max_cached_prefix_tokens is -1"),
        (spec("a", 100, max_new_tokens=100), "100 prompt tokens and 100 to generate"),
        (spec("a", 8, page_digests=b"x"), "1 bytes of page digests for 2 pages"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_reason(bad, reason):
    rig = Rig()
    assert reason in rig.scheduler.submit([spec("b", 4), bad])
    assert rig.scheduler.sizes().waiting == 0


def test_an_abort_in_any_state_gives_everything_back():
    for rounds in range(5):
        rig = Rig(max_scheduled_tokens=4)
        rig.submit("a", 10)
        for _ in range(rounds):
            rig.plan()
        rig.abort("a")
        assert rig.at_baseline(), f"after {rounds} plans"


def test_a_finish_with_results_outstanding_holds_its_pages_until_they_came():
    rig = Rig(overlap_depth=1)
    rig.submit("a", 6)
    rig.plan()
    rig.plan()
    rig.commit()
    rig.finish("a")
    assert rig.scheduler.sizes().finishing == 1
    assert not rig.at_baseline()
    rig.commit()
    assert rig.scheduler.sizes().finishing == 0
    assert rig.at_baseline()


def test_a_chunk_owes_no_tokens():
    rig = Rig(max_scheduled_tokens=4)
    rig.submit("a", 10)
    results = results_of(rig.plan().batch)
    one = np.ones(1, np.int32)
    wrong = Results(rows=results.rows, generations=results.generations, counts=one, tokens=one)
    with pytest.raises(IllegalTransitionError):
        rig.scheduler.advance([wrong])
    rig.commit()
    assert rig.scheduler.token_size("a") == 10


def test_unknown_ids_are_ignored():
    rig = Rig()
    rig.finish("nobody")
    rig.abort("nobody")


def test_results_of_a_request_that_is_gone_are_ignored():
    rig = Rig()
    rig.submit("a", 6)
    rig.plan()
    rig.abort("a")
    rig.submit("b", 6)
    rig.plan()
    rig.commit()
    assert rig.scheduler.token_size("b") == 6
    rig.commit()
    assert rig.scheduler.token_size("b") == 7
