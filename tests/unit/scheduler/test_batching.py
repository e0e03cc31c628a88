"""Which prompts and decodes share a round, and in which chunks."""

import numpy as np
from scheduler_rig import Rig

from drumline.contract.specs import AttentionKind, CacheGroup


def lengths(plan) -> list[int]:
    return plan.batch.input_lengths.tolist()


def test_a_long_prompt_is_cut_into_chunks_of_the_budget():
    rig = Rig(max_scheduled_tokens=10)
    rig.submit("a", 30)
    chunks = [rig.round() for _ in range(3)]
    assert [lengths(plan) for plan in chunks] == [[10], [10], [10]]
    assert [plan.batch.prefix_lengths.tolist() for plan in chunks] == [[0], [10], [20]]


def test_what_is_left_of_the_budget_goes_to_the_next_request():
    rig = Rig(max_scheduled_tokens=8, mixed_batch=False)
    rig.submit("a", 19)
    rig.submit("b", [90 + at for at in range(9)])
    plans = [rig.round() for _ in range(3)]
    assert [rig.rids(plan) for plan in plans] == [["a"], ["a"], ["a", "b"]]
    assert lengths(plans[2]) == [3, 5]


def test_decodes_wait_while_there_is_a_prompt_unless_batches_are_mixed():
    for mixed in (False, True):
        rig = Rig(mixed_batch=mixed)
        rig.submit("a", 6)
        rig.round()
        rig.submit("b", [90, 91, 92])
        assert rig.rids(rig.round()) == (["b", "a"] if mixed else ["b"])


def test_decodes_take_their_share_of_a_mixed_budget_first():
    rig = Rig(max_scheduled_tokens=8)
    rig.submit("a", 6)
    rig.round()
    rig.submit("b", [90 + at for at in range(20)])
    assert lengths(rig.round()) == [7, 1]


def test_the_prompt_share_of_a_mixed_batch_can_be_bounded():
    rig = Rig(max_scheduled_tokens=32, mixed_prefill_tokens=3)
    rig.submit("a", 6)
    assert lengths(rig.round()) == [6], "nobody decodes yet"
    rig.submit("b", [90 + at for at in range(20)])
    assert lengths(rig.round()) == [3, 1]


def test_no_more_requests_run_than_there_are_rows_and_rows_are_reused_in_turn():
    rig = Rig(max_rows=2)
    for name in ("a", "b", "c"):
        rig.submit(name, [ord(name), 1, 2])
    plan = rig.round()
    assert rig.rids(plan) == ["a", "b"]
    assert plan.batch.rows.tolist() == [1, 2]
    rig.abort("a")
    plan = rig.round()
    assert rig.rids(plan)[0] == "c"
    assert rig.row("c") == 1


def test_a_request_that_does_not_fit_is_passed_by_a_smaller_one():
    rig = Rig(num_pages=10)
    rig.submit("a", 9, max_new_tokens=12)
    rig.round()
    rig.submit("big", [60 + at for at in range(16)], max_new_tokens=8)
    rig.submit("small", [90, 91])
    assert "small" in rig.rids(rig.round())
    assert "found no room" in rig.scheduler.explain("big")


def test_a_declared_budget_is_reserved_at_the_first_chunk():
    rig = Rig(num_pages=40, max_scheduled_tokens=4)
    rig.submit("a", 12, max_new_tokens=100)
    rig.round()
    assert len(rig.pages("a")) == 28


def test_requests_that_share_a_prefix_in_flight_compute_it_once():
    for sharing in (True, False):
        rig = Rig(num_pages=800, max_rows=32, max_scheduled_tokens=2048, share_in_flight=sharing)
        for number in range(32):
            rig.submit(f"r{number}", [*range(64), 1000 + number])
        tokens = sum(rig.round().batch.tokens for _ in range(2))
        assert (tokens < 64 + 32 * 3) == sharing


def test_a_prefix_that_is_cached_is_not_computed_again():
    rig = Rig()
    rig.submit("a", 10)
    rig.round()
    rig.round()
    rig.finish("a")
    rig.submit("b", [*range(10), 70, 71])
    plan = rig.round()
    assert plan.batch.prefix_lengths.tolist() == [10]
    assert rig.scheduler.cached_tokens("b") == 10
    assert len(plan.copies) == 1, "the shared partial page is copied"
    assert np.array_equal(rig.pages("b")[:2], rig.plans[0].patches[0].blocks[:2])


def test_a_salted_prefix_is_found_under_its_salt_only():
    rig = Rig()
    rig.submit("a", 9, cache_salt="x")
    rig.round()
    rig.round()
    rig.finish("a")
    rig.submit("b", 9)
    rig.submit("c", 9, cache_salt="x")
    rig.round()
    assert (rig.scheduler.cached_tokens("b"), rig.scheduler.cached_tokens("c")) == (0, 8)


def test_a_cached_prefix_is_cut_by_its_cap_and_never_covers_a_prompt():
    rig = Rig()
    rig.submit("a", 16)
    rig.round()
    rig.round()
    rig.submit("whole", 16)
    rig.submit("capped", 16, max_cached_prefix_tokens=7)
    rig.round()
    assert rig.scheduler.cached_tokens("whole") == 12
    assert rig.scheduler.cached_tokens("capped") == 4


def test_the_last_tokens_of_a_prompt_are_computed_again_when_they_are_to_be_replayed():
    rig = Rig(prefix_replay_tokens=6)
    rig.submit("a", 17)
    rig.round()
    rig.round()
    rig.finish("a")
    rig.submit("b", 17)
    rig.submit("short", 5)
    assert rig.round().batch.prefix_lengths.tolist() == [8, 0]
    assert rig.pages("b")[:2] == rig.plans[0].patches[0].blocks[:2].tolist()
    assert rig.pages("b")[2] not in rig.plans[0].patches[0].blocks.tolist()


def test_clearing_waits_for_cached_pages_that_are_held():
    rig = Rig()
    rig.submit("a", 9)
    rig.round()
    rig.round()
    assert not rig.scheduler.clear()
    rig.finish("a")
    assert rig.scheduler.clear()
    assert rig.scheduler.empty_pages == 31


def test_a_tail_that_does_not_fit_beside_its_copy_is_computed_again():
    rig = Rig(num_pages=9, prefix_granularity=8)
    rig.submit("a", 22)
    rig.round()
    rig.round()
    rig.finish("a")
    rig.submit("b", [*range(22), 70, 71, 72], max_new_tokens=3)
    plan = rig.round()
    assert rig.rids(plan) == ["b"]
    assert rig.scheduler.cached_tokens("b") == 16


def test_a_window_waits_for_drafts_in_flight_before_it_lets_go_of_blocks():
    window = CacheGroup(
        group_id="window", kind=AttentionKind.SLIDING_WINDOW, block_tokens=2, window_tokens=3
    )
    rig = Rig(groups=(window,), overlap_depth=1, decode_tokens=3, prefix_granularity=2)
    rig.submit("a", 1)
    for _ in range(12):
        rig.round(depth=1)
    rig.submit("b", [90])
    rig.round()  # no decode: what is in flight commits with every draft rejected
    assert rig.round().batch.input_lengths.tolist() == [3, 3], "and each found its window"


def test_each_prompt_token_knows_the_next_one_and_the_last_of_a_prompt_none():
    rig = Rig(max_scheduled_tokens=6)
    rig.submit("a", [10, 11, 12, 13])
    rig.submit("b", [20, 21, 22, 23, 24])
    assert rig.round().batch.shifted_ids.tolist() == [11, 12, 13, -1, 21, 22]
    assert rig.round().batch.shifted_ids.tolist() == [23, 24, -1], "across the chunk's end"
