"""What of a prompt is found cached, who shares which pages, and what goes first."""

import random

import numpy as np
import pytest
from scheduler_rig import Rig, sampled

from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.core.hashing import page_digest
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.digests import Digests
from drumline.scheduler.prefix import PrefixIndex

FULL = CacheGroup(group_id="full", block_tokens=4)


def window(tokens: int, name: str = "window", block: int = 4) -> CacheGroup:
    return CacheGroup(
        group_id=name,
        kind=AttentionKind.SLIDING_WINDOW,
        block_tokens=block,
        window_tokens=tokens,
    )


def ended(rig: Rig, rid: str, tokens, rounds: int = 2) -> None:
    rig.submit(rid, tokens)
    for _ in range(rounds):
        rig.round()
    rig.finish(rid)


def found(rig: Rig, rid: str, tokens) -> int:
    """The tokens of a prompt that its admission finds cached."""
    assert rig.submit(rid, tokens) is None
    rig.round()
    return rig.scheduler.cached_tokens(rid)


def test_two_requests_of_one_prefix_hold_the_same_pages():
    rig = Rig()
    rig.submit("a", 9)
    rig.round()
    rig.round()
    rig.submit("b", [*range(8), 90, 91])
    rig.round()
    shared = rig.pages("a")[:2]
    assert rig.pages("b")[:2] == shared
    assert rig.scheduler._pool.refs[shared].tolist() == [2, 2]
    rig.abort("a")
    assert rig.scheduler._pool.refs[shared].tolist() == [1, 1]


def test_without_prefix_caching_nothing_is_found():
    rig = Rig(prefix_caching=False)
    ended(rig, "a", 9)
    assert found(rig, "b", 9) == 0


def test_an_answers_pages_are_found_by_the_next_turn_of_a_conversation():
    rig = Rig()
    ended(rig, "a", 6, rounds=8)
    turn = [*range(6), *(sampled(at) for at in range(6, 13)), 90, 91]
    assert found(rig, "b", turn) >= 12


def test_an_owner_moves_off_the_partial_page_that_others_may_share():
    rig = Rig()
    rig.submit("a", 10)
    rig.round()
    before = rig.pages("a")
    plan = rig.round()
    after = rig.pages("a")
    assert after[:2] == before[:2]
    assert after[2] != before[2]
    assert [part.sources.tolist() for part in plan.copies] == [[before[2]]]
    assert [part.targets.tolist() for part in plan.copies] == [[after[2]]]


def test_a_hit_that_ends_within_a_page_reads_a_copy_of_its_own():
    rig = Rig()
    rig.submit("a", 10)
    rig.round()
    published = rig.pages("a")[2]
    rig.round()
    rig.submit("b", [*range(10), 90, 91])
    plan = rig.round()
    assert rig.scheduler.cached_tokens("b") == 10
    assert [part.sources.tolist() for part in plan.copies] == [[published]]
    assert [part.targets.tolist() for part in plan.copies] == [[rig.pages("b")[2]]]
    assert rig.pages("b")[2] not in [page for part in plan.zeroes for page in part.blocks]


def test_an_aborted_request_publishes_nothing_more():
    rig = Rig(share_in_flight=False)
    rig.submit("a", 9)
    rig.plan()
    rig.commit()
    rig.abort("a")
    assert found(rig, "b", 9) == 0


def test_a_window_is_hit_only_where_the_run_it_looks_back_on_is_cached():
    rig = Rig(groups=(FULL, window(6)))
    ended(rig, "a", 16)
    # At 8 the window would need tokens 3 … 7, which it had passed when pages were offered.
    assert found(rig, "b", [*range(8), 90, 91]) == 0
    assert found(rig, "c", [*range(16), 90, 91]) == 16


@pytest.mark.parametrize("order", [(6, 3), (3, 6)])
def test_two_windows_agree_on_one_boundary_in_whichever_order_they_are_asked(order):
    groups = (FULL, window(order[0], "one"), window(order[1], "two", 2))
    rig = Rig(groups=groups, num_pages=60)
    ended(rig, "a", 12)
    ended(rig, "b", 20)
    assert found(rig, "c", [*range(14), 90]) == 12
    assert found(rig, "d", [*range(20), 90]) == 20


@pytest.mark.parametrize("seed", range(4))
def test_whatever_was_cached_and_given_up_a_hit_is_warm_in_every_group(seed):
    chance = random.Random(seed)
    rig = Rig(groups=(FULL, window(6), window(3, "small", 2)), num_pages=40)
    for number in range(60):
        head = chance.randint(0, 2) * 100
        rig.submit(f"r{number}", [head + at for at in range(chance.randint(1, 30))])
        for _ in range(chance.randint(1, 4)):
            rig.round()  # the rig reads every position that a row looks back on
        for rid in list(rig.prompts):
            if rig.scheduler.sizes().decoding > 2 and rig.scheduler.token_size(rid) > 0:
                rig.abort(rid)
    hits = [plan.batch.prefix_lengths[: plan.batch.extends] for plan in rig.plans if plan.batch]
    assert np.concatenate(hits).any(), "some were hits"


def test_the_prefix_that_was_used_longest_ago_goes_first():
    rig = Rig(num_pages=13, max_rows=2)
    for number, name in enumerate("abc"):
        ended(rig, name, [number * 100 + at for at in range(8)])
    assert found(rig, "a again", [*range(8), 90]) == 8
    rig.abort("a again")
    ended(rig, "big", [500 + at for at in range(26)])
    find = rig.scheduler._parts.index.find
    firsts = [page_digest(b"", np.arange(n, n + 4, dtype=np.int32).tobytes()) for n in (0, 100)]
    assert find(firsts[0]), "it was used again since"
    assert not find(firsts[1]), "b was used before it"


def test_of_one_prefix_the_end_goes_before_the_start():
    rig = Rig(num_pages=9, max_rows=1)
    ended(rig, "a", 16)
    ended(rig, "b", [500 + at for at in range(18)], rounds=1)
    cached = found(rig, "c", [*range(16), 90])
    assert 0 < cached < 16


def test_no_more_is_given_up_than_is_needed():
    rig = Rig(num_pages=13)
    ended(rig, "a", 16)
    cached = len(rig.scheduler._pool.cached_blocks())
    empty = rig.scheduler.empty_pages
    rig.submit("b", [500 + at for at in range(4 * empty + 3)])
    rig.round()
    assert cached - len(rig.scheduler._pool.cached_blocks()) == 1


def test_a_hit_is_not_given_up_for_the_rest_of_its_own_prompt():
    rig = Rig(num_pages=9, max_rows=1)
    ended(rig, "a", 12)
    rig.submit("b", [*range(12), *(500 + at for at in range(14))])
    plan = rig.round()
    assert plan.batch.prefix_lengths.tolist() == [12]


def test_asking_what_is_cached_does_not_keep_it_longer():
    orders = []
    for asking in (False, True):
        rig = Rig(num_pages=13, max_rows=1)
        ended(rig, "a", 8)
        ended(rig, "b", [100 + at for at in range(8)])
        if asking:
            rig.submit("probe", [*range(8), 90])
            rig.scheduler.explain("probe")
            rig.abort("probe")
        ended(rig, "big", [500 + at for at in range(26)])
        orders.append(np.sort(rig.scheduler._pool.cached_blocks()).tolist())
    assert orders[0] == orders[1]


def test_boundaries_made_along_a_prompt_are_found_together_as_far_as_they_are_still_its():
    index = PrefixIndex(4, [1])
    groups = (CacheGroup(group_id="full", block_tokens=4),)
    index.watch(BlockPool(groups, 60, lambda _group, _blocks: None, index.depth))
    rng = np.random.default_rng(0)
    mine, other = ([rng.bytes(32) for _ in range(8)] for _ in range(2))

    def offer(names, first_page, first_block, *, chained=True):
        at = np.arange(len(names))
        index.publish(names, 4 * (first_page + 1 + at), [first_block + at], chained=chained)

    def leading(names, count=8):
        nodes = index.known(Digests(b"".join(names)), count)
        assert nodes.tolist() == [index.find(name) for name in names[: len(nodes)]]
        return len(nodes)

    offer(mine, 0, 1)
    assert (leading(mine), leading(mine, 3), leading(other)) == (8, 3, 0)
    assert leading(mine[:5] + other[:3]) == 5, "where another prompt leaves it"
    offer(other[:4], 5, 20)
    assert leading(mine[:5] + other[:3]) == 8, "and goes on along its own"
    index.forget(0, np.arange(6, 9))
    assert leading(mine) == 5, "the end was given up"
    offer(other[4:7], 0, 30, chained=False)
    assert leading(mine) == 5, "and its place taken by others"
    offer(mine[5:], 5, 40, chained=False)
    assert leading(mine) == 8
    index.forget(0, np.array([1]))
    assert leading(mine) == 0
