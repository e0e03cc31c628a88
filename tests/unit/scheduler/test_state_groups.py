"""State groups: what recurrent layers carry, cached at boundaries and matched with the rest."""

import numpy as np
import pytest
from scheduler_rig import Rig, sampled

from drumline.contract.cache import LoadBack, Restore, Snapshot
from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.core.errors import ConfigError
from drumline.core.hashing import page_digests

FULL = CacheGroup(group_id="full", block_tokens=4)
STATE = CacheGroup(group_id="state", kind=AttentionKind.STATE, block_tokens=0)
PACKED_STATE = CacheGroup(
    group_id="packed state", kind=AttentionKind.STATE, block_tokens=0, blocks_per_parent=3
)
WINDOW = CacheGroup(
    group_id="window", kind=AttentionKind.SLIDING_WINDOW, block_tokens=4, window_tokens=6
)


def hybrid(*states: CacheGroup, **changes) -> Rig:
    """One full group, and state groups behind it."""
    return Rig(groups=(FULL, *(states or (STATE,))), **changes)


def slots(rig: Rig, rid: str, group: int = 1) -> list[int]:
    """The blocks that a row's forwards read and write."""
    return rig.tables[group][rig.row(rid), :2].tolist()


def zeroed(plan, group: int = 1) -> list[int]:
    return [page for part in plan.zeroes if part.group == group for page in part.blocks.tolist()]


def found(rig: Rig, rid: str, tokens) -> int:
    """The tokens of a prompt that its admission finds cached; it is answered and taken back."""
    assert rig.submit(rid, tokens) is None
    rig.round()
    cached = rig.scheduler.cached_tokens(rid)
    for _ in range(3):
        rig.round()
    rig.abort(rid)
    return cached


def test_a_first_chunk_reads_a_blank_block_and_writes_another():
    rig = hybrid(max_scheduled_tokens=6)
    rig.submit("a", 14)
    plan = rig.round()
    read, written = slots(rig, "a")
    assert read != written
    assert sorted(zeroed(plan)) == sorted((read, written))


def test_a_chunk_reads_what_the_one_before_it_wrote():
    rig = hybrid(STATE, PACKED_STATE, max_scheduled_tokens=6)
    rig.submit("a", 14)
    rig.round()
    before = [slots(rig, "a", group)[1] for group in (1, 2)]
    plan = rig.round()
    for group, block in zip((1, 2), before, strict=True):
        assert slots(rig, "a", group)[0] == block
        assert zeroed(plan, group) == [slots(rig, "a", group)[1]]


def test_the_first_decode_moves_to_a_live_block_and_the_second_lets_go_of_the_prompts():
    rig = hybrid()
    rig.submit("a", 10)
    rig.round()
    prompts = slots(rig, "a")[1]
    rig.round()
    read, live = slots(rig, "a")
    assert (read, live) == (prompts, slots(rig, "a")[1])
    for _ in range(6):
        rig.round()
        assert slots(rig, "a") == [0, live], "decodes write in place"


def test_without_prefix_caching_decodes_go_on_in_the_prompts_block():
    rig = hybrid(prefix_caching=False)
    rig.submit("a", 10)
    rig.round()
    prompts = slots(rig, "a")[1]
    for _ in range(3):
        rig.round()
        assert slots(rig, "a") == [0, prompts]


@pytest.mark.parametrize("tokens", [10, 12])
def test_a_prompts_end_is_hit_by_who_goes_on_from_there(tokens):
    rig = hybrid()
    rig.submit("a", tokens)
    rig.round()
    kept = slots(rig, "a")[1]
    rig.round()
    rig.submit("b", [*range(tokens), 90, 91])
    plan = rig.round()
    assert rig.scheduler.cached_tokens("b") == tokens
    read, written = slots(rig, "b")
    assert read == kept, "what a carried up to there"
    assert zeroed(plan) == [written]


def test_between_the_ends_of_prompts_nothing_is_carried_and_nothing_hit():
    rig = hybrid(max_scheduled_tokens=8)
    rig.submit("a", 18)
    for _ in range(4):
        rig.round()
    rig.finish("a")
    assert rig.submit("b", [*range(8), 90]) is None
    rig.round()
    assert rig.scheduler.cached_tokens("b") == 0


def test_the_third_request_of_a_prefix_hits_the_boundary_that_the_second_promoted():
    rig = hybrid()
    rig.submit("a", [*range(16), 70, 71])
    for _ in range(2):
        rig.round()
    rig.submit("b", [*range(16), 80, 81, 82])
    plan = rig.round()
    assert rig.scheduler.cached_tokens("b") == 0
    assert plan.batch.input_lengths[0] == 16, "a chunk stops where a's pages end"
    rig.round()
    assert found(rig, "c", [*range(16), 90, 91]) == 16


def test_the_third_request_of_a_prefix_hits_what_windows_look_back_on_there():
    rig = Rig(groups=(FULL, WINDOW))
    rig.submit("a", [*range(16), *range(70, 80)])
    for _ in range(2):
        rig.round()
    rig.submit("b", [*range(16), *range(80, 90)])
    plan = rig.round()
    assert rig.scheduler.cached_tokens("b") == 0
    assert plan.batch.input_lengths[0] == 26, "no chunk stops for windows"
    rig.round()
    assert found(rig, "c", [*range(16), 90, 91]) == 16


@pytest.mark.parametrize("budget", [6, 12, 64])
def test_chunks_keep_what_windows_look_back_on_at_their_ends_and_where_it_is_promoted(budget):
    rig = Rig(groups=(FULL, WINDOW), max_scheduled_tokens=budget)
    for rid, more in (("a", range(70, 90)), ("b", range(90, 110))):
        rig.submit(rid, [*range(16), *more])
        ends = set()
        for _ in range(8):
            batch = rig.round().batch
            ends.add(int(batch.prefix_lengths[0] + batch.input_lengths[0]))
        rig.abort(rid)
    index, group = rig.scheduler._parts.index, 1
    digests = page_digests(np.array([*range(16), *range(90, 110)], np.int32), 4)
    for tokens in (end for end in {*ends, 16} if end % 4 == 0 and end <= 36):
        for page in range((tokens - 5) // 4, tokens // 4):
            node = index.find(digests[32 * page : 32 * page + 32])
            assert index.blocks[group][node, 0], f"page {page}, which a window at {tokens} reads"
    assert found(rig, "c", [*range(16), 50, 51]) == 16


def test_windows_and_states_are_promoted_together():
    rig = Rig(groups=(FULL, WINDOW, STATE), num_pages=60)
    for rid, more in (("a", range(70, 80)), ("b", range(80, 90))):
        rig.submit(rid, [*range(16), *more])
        for _ in range(3):
            rig.round()
    assert found(rig, "c", [*range(16), 90, 91]) == 16


def test_requests_of_one_prefix_compute_it_twice_however_many_they_are():
    rig = hybrid(num_pages=200, max_scheduled_tokens=64, max_rows=20)
    for number in range(12):
        rig.submit(f"r{number}", [*range(32), 100 + number, 200 + number])
    for _ in range(12):
        rig.round()
    cached = [rig.scheduler.cached_tokens(f"r{number}") for number in range(12)]
    assert cached == [0, 0] + [32] * 10


def test_an_answers_end_is_found_by_the_next_turn_of_a_conversation():
    rig = hybrid()
    rig.submit("a", 6)
    for _ in range(8):
        rig.round()
    text = [*range(6), *(sampled(at) for at in range(6, 13))]
    rig.finish("a")
    rig.round()
    assert found(rig, "b", [*text, 90, 91]) == 13


def test_an_answer_that_ends_with_a_page_is_found_too():
    rig = hybrid()
    rig.submit("a", 6)
    for _ in range(7):
        rig.round()
    rig.finish("a")
    text = [*range(6), *(sampled(at) for at in range(6, 12))]
    assert found(rig, "b", [*text, 90, 91]) == 12


def test_a_request_is_admitted_with_blocks_of_every_group_or_with_none():
    rig = hybrid(num_pages=8)
    rig.submit("a", [50 + at for at in range(12)])
    rig.round()  # three pages of tokens and two of what is carried: two are left
    empty = rig.scheduler.empty_pages
    rig.submit("b", [90, 91, 92, 93])
    plan = rig.plan()
    assert "b" not in rig.rids(plan), "one page is too few for what it carries"
    assert rig.scheduler.empty_pages >= empty - 2
    assert not any(bound.rid == "b" for bound in plan.bound)


def test_a_block_that_others_may_read_is_never_written_again():
    rig = hybrid(num_pages=60)
    rig.submit("a", 10)
    rig.round()
    rig.round()
    kept = slots(rig, "a")[0]
    rig.submit("b", [*range(10), 90])
    rig.submit("c", [*range(10), 91])
    written = set()
    for _ in range(8):
        plan = rig.round()
        written |= {slots(rig, rid)[1] for rid in rig.rids(plan)}
    assert kept not in written


def test_a_suspended_request_takes_what_it_carries_along_to_a_live_block():
    rig = hybrid(num_pages=12, num_snapshot_pages=20, max_retracted_requests=2)
    rig.submit("a", 9)
    rig.submit("b", [50, 51, 52, 53, 54])
    images = []
    while not images:
        plan = rig.round()
        images = [op for op in plan.cache_ops if isinstance(op, Snapshot)]
    (image,) = images
    assert [len(part.sources) for part in image.moves if part.group == 1] == [1]
    rig.acknowledge()
    rig.finish("b" if image.rid == "a" else "a")
    back = []
    while not back:
        back = [op for op in rig.round().cache_ops if isinstance(op, Restore)]
    assert [len(part.targets) for part in back[0].from_snapshot if part.group == 1] == [1]
    rig.acknowledge()
    plan = rig.round()  # the rig checks what it reads
    assert rig.rids(plan) == [image.rid]
    assert slots(rig, image.rid)[0] == 0


def test_what_is_carried_is_kept_in_host_memory_and_loaded_with_the_prefix():
    rig = hybrid(num_host_pages=40)
    rig.submit("a", 12)
    for _ in range(3):
        rig.round()
    rig.finish("a")
    rig.round()
    while rig.unacknowledged:
        rig.acknowledge()
    assert rig.scheduler.clear_l1()
    rig.submit("b", [*range(12), 90])
    plan = rig.round()
    assert rig.scheduler.cached_tokens("b") == 12
    (load,) = [op for op in plan.cache_ops if isinstance(op, LoadBack)]
    assert [len(part.targets) for part in load.moves] == [3, 1]


def test_a_reader_learns_of_a_page_once_what_is_carried_behind_it_is_kept():
    rig = hybrid(kv_events=True)
    rig.submit("a", 10)
    for _ in range(3):
        rig.round()
    told = [event.token_ids for event in rig.scheduler.drain_kv_events()]
    assert told == [(8, 9)], "the prompt's end alone can be hit"


def test_blocks_of_what_is_carried_leave_room_for_tokens_in_the_longest_request():
    longest = Rig(num_pages=16).scheduler.max_request_tokens
    assert hybrid(num_pages=16).scheduler.max_request_tokens == longest - 2 * 4
    assert hybrid(STATE, STATE, num_pages=16).scheduler.max_request_tokens == longest - 4 * 4
    assert hybrid(PACKED_STATE, num_pages=16).scheduler.max_request_tokens == longest - 4


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((STATE, FULL), "must come before"),
        ((FULL, STATE, WINDOW), "behind all others"),
        ((FULL, CacheGroup(group_id="s", kind=AttentionKind.STATE, block_tokens=4)), "is not 0"),
    ],
)
def test_a_state_group_that_does_not_fit_is_refused_by_name(groups, said):
    with pytest.raises(ConfigError, match=said):
        Rig(groups=groups)


@pytest.mark.parametrize("depth", [0, 1])
def test_forty_decodes_change_one_block_however_many_forwards_are_in_flight(depth):
    rig = hybrid(num_pages=40, overlap_depth=depth)
    rig.submit("a", 5)
    for _ in range(42):
        rig.round(depth)
    used = {
        int(block)
        for plan in rig.plans
        for patch in plan.patches
        if patch.group == 1
        for block in np.unique(patch.blocks)
    }
    assert len(used - {0}) == 3
