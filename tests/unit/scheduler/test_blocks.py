"""Parents, the blocks cut from them, and rows that windows slide over."""

import numpy as np
import pytest
from scheduler_rig import Rig, spec

from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.events import IllegalTransitionError, Reserved
from drumline.scheduler.eviction import EvictionOrder

FULL = CacheGroup(group_id="full", block_tokens=4)
FINE = CacheGroup(group_id="fine", block_tokens=2)


def pool(parents: int, *packing: int) -> BlockPool:
    groups = [
        CacheGroup(group_id=f"g{at}", block_tokens=4, blocks_per_parent=blocks)
        for at, blocks in enumerate(packing)
    ]
    return BlockPool(groups, parents, lambda _group, _blocks: None, lambda blocks: blocks)


def window(tokens: int, block: int = 4, **changes) -> CacheGroup:
    return CacheGroup(
        group_id="window",
        kind=AttentionKind.SLIDING_WINDOW,
        block_tokens=block,
        window_tokens=tokens,
        **changes,
    )


def test_a_parent_that_is_used_in_part_is_filled_before_an_empty_one_is_cut():
    mine = pool(8, 3)
    first = mine.take(0, 4)
    assert mine.parents(first).tolist() == [1, 2]
    mine.release(first[:1])
    again = mine.take(0, 2)
    assert mine.parents(again).tolist() == [1, 2], "the fuller parent first, and no third"
    mine.check()


def test_a_parent_serves_another_group_only_after_its_last_block():
    mine = pool(3, 2, 1)
    both = mine.take(0, 4)
    assert not mine.fits([0, 1])
    mine.release(both[:1])
    assert not mine.fits([0, 1]), "one block of the parent is out still"
    mine.release(both[1:2])
    assert mine.fits([0, 1])
    assert mine.parents(mine.take(1, 1)).tolist() == [1]
    mine.check()


def test_blocks_of_all_groups_are_taken_together_or_not_at_all():
    rig = Rig(groups=(FULL, FINE), num_pages=16)
    rig.submit("a", [50 + at for at in range(12)], max_new_tokens=4)
    rig.round()
    empty = rig.scheduler.empty_pages
    rig.submit("b", [90 + at for at in range(12)], max_new_tokens=4)
    plan = rig.round()
    assert "b" not in rig.rids(plan)
    assert rig.scheduler.empty_pages == empty, "nor did the group with room give any"


def test_groups_that_pack_a_parent_differently_name_its_blocks_by_ids_of_their_own():
    mine = pool(6, 1, 4)
    whole, parts = mine.take(0, 2), mine.take(1, 5)
    assert mine.pages(0, whole).tolist() == [1, 2]
    assert mine.pages(1, parts).tolist() == [9, 10, 11, 12, 13], "parents 3 and 4, four to each"
    assert np.intersect1d(whole, parts).size == 0


def test_groups_of_different_granularity_have_rows_of_their_own_lengths():
    rig = Rig(groups=(FULL, FINE))
    rig.submit("a", 9)
    rig.round()
    assert len(rig.pages("a", 0)) == 3
    assert len(rig.pages("a", 1)) == 5


def test_a_window_lets_go_of_a_block_in_the_plan_after_its_last_token_left():
    rig = Rig(groups=(window(6),), prefix_caching=False)
    rig.submit("a", 4)
    first = None
    for computed in range(4, 20):
        rig.round()
        if first is None and rig.tables[0][rig.row("a"), 0] == 0:
            first = computed
    # Of 10 tokens, the last looks back on 4 … 9; the block holds 0 … 3. The next plan sees it.
    assert first == 10


def test_rows_of_other_lengths_keep_their_columns_and_leave_holes_where_a_window_passed():
    rig = Rig(groups=(FULL, window(6)))
    rig.submit_all([spec("long", 20), spec("short", [60 + at for at in range(5)])])
    for _ in range(4):
        rig.round()
    full, windowed = (rig.tables[group][rig.row("long")] for group in (0, 1))
    assert (full[:6] > 0).all()
    assert windowed[:3].tolist() == [0, 0, 0], "holes: what is behind them stays where it is"
    assert (windowed[4:6] > 0).all()
    assert not full[6:].any(), "nothing beyond the last column"
    assert not rig.tables[0][rig.row("short"), 2:].any()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_a_window_within_a_block_holds_two_blocks_at_most(tokens):
    rig = Rig(groups=(window(tokens),), prefix_caching=False)
    rig.submit("a", 3)
    for _ in range(30):
        rig.round()
        assert np.count_nonzero(rig.tables[0][rig.row("a")]) <= 2


def test_a_prompt_longer_than_the_pool_is_served_because_its_window_slides():
    packed = CacheGroup(group_id="full", block_tokens=4, blocks_per_parent=4)
    rig = Rig(groups=(packed, window(6)), num_pages=12, max_scheduled_tokens=8)
    assert rig.scheduler.max_request_tokens == 76
    assert rig.submit("a", [50 + at for at in range(64)]) is None, "16 blocks of 11 parents"
    for _ in range(8):
        assert rig.rids(rig.round()) == ["a"]
    assert rig.rids(rig.round()) == ["a"]
    assert rig.scheduler.sizes().decoding == 1


def test_where_windows_are_all_there_is_the_model_alone_bounds_a_request():
    rig = Rig(groups=(window(6),), num_pages=9, max_scheduled_tokens=8, max_model_tokens=500)
    assert rig.scheduler.max_request_tokens == 500


@pytest.mark.parametrize("caching", [True, False])
def test_forty_decodes_in_a_small_window_pool_find_room(caching):
    rig = Rig(
        groups=(window(6),),
        num_pages=9,
        max_scheduled_tokens=8,
        prefix_caching=caching,
        max_model_tokens=100,
    )
    rig.submit("a", 5)
    for _ in range(42):
        assert rig.rids(rig.round()) == ["a"]


def test_a_row_is_the_same_from_prompt_to_answer():
    rig = Rig(max_scheduled_tokens=4)
    rig.submit("a", 10)
    rows = [rig.round().batch.rows.tolist() for _ in range(6)]
    assert rows == [[1]] * 6


def test_a_chunk_of_the_running_prompt_goes_before_a_new_request():
    rig = Rig(max_scheduled_tokens=4)
    rig.submit("a", 6)
    rig.round()
    rig.submit("b", [90, 91])
    assert rig.rids(rig.round()) == ["a", "b"]


def test_nobody_is_admitted_behind_a_prompt_that_stays_unfinished():
    rig = Rig(max_scheduled_tokens=8)
    rig.submit("a", 5)
    rig.submit("b", [60 + at for at in range(20)])
    rig.submit("c", [90])
    assert rig.rids(rig.round()) == ["a", "b"]
    assert rig.rids(rig.round()) == ["b", "a"]


def test_a_reservation_gives_the_next_decode_of_its_request_room_and_no_other():
    rig = Rig(num_pages=40)
    rig.submit_all([spec("a", 8), spec("b", [60 + at for at in range(8)])])
    rig.round()
    rig.round()
    rig.scheduler.advance([Reserved("a", 9), Reserved("unknown", 9)])
    rig.round()
    assert (len(rig.pages("a")), len(rig.pages("b"))) == (5, 3), "9 tokens, and 9 behind them"
    for _ in range(9):
        rig.round()
    assert len(rig.pages("a")) == 5, "used up before more is taken, a decode's room at a time"
    rig.round()
    rig.round()
    assert (len(rig.pages("a")), len(rig.pages("b"))) == (6, 6)


def test_only_who_decodes_may_reserve():
    rig = Rig()
    rig.submit("a", 8)
    with pytest.raises(IllegalTransitionError, match="RESERVE is illegal in state SUBMITTED"):
        rig.scheduler.advance([Reserved("a", 9)])


def test_reserved_blocks_are_nobody_elses():
    rig = Rig(num_pages=10)
    rig.submit("a", 4, max_new_tokens=20)
    rig.round()
    assert len(rig.pages("a")) == 6
    rig.submit("b", [90 + at for at in range(12)])
    assert "b" not in rig.rids(rig.round()), "three are left, and b needs a decode's too"
    for _ in range(18):
        assert rig.rids(rig.round()) == ["a"]
    assert not rig.plans[-1].aborts


def test_an_abort_gives_back_what_was_reserved():
    rig = Rig(num_pages=40)
    rig.submit("a", 4, max_new_tokens=100)
    rig.round()
    assert rig.scheduler.active_pages() == 26
    rig.abort("a")
    assert rig.at_baseline()
    assert rig.scheduler.empty_pages == 39


def test_a_declared_budget_is_reserved_up_to_4096_tokens():
    rig = Rig(num_pages=2000)
    rig.submit("a", 12, max_new_tokens=5000)
    rig.round()
    assert len(rig.pages("a")) == (12 + 4096) // 4


@pytest.mark.parametrize(("depth", "width"), [(0, 1), (1, 1), (0, 3), (1, 3)])
def test_the_room_for_one_request_leaves_a_forward_in_flight_its_tokens(depth, width):
    alone = Rig(num_pages=200, overlap_depth=depth, decode_tokens=width)
    assert alone.scheduler.max_request_tokens == 792 - depth * width


@pytest.mark.parametrize("asked", [False, True])
def test_what_waits_is_told_in_one_order_however_often_somebody_asked_before(asked):
    order = EvictionOrder(lambda blocks: blocks, lambda blocks, _epoch: blocks)
    for blocks, epoch in (([7, 8], 5), ([1, 2], 3)):
        order.file(np.array(blocks), np.full(2, epoch), waiting=4)
        if asked:
            order.waiting()
    assert order.waiting().tolist() == [1, 2, 7, 8]
