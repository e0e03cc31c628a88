"""What readers are told of the cache: the net change, a page in all groups at a time."""

import random

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig

from drumline.contract.kv_events import BlockRemoved, BlockStored
from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.core.hashing import event_hash, page_digest
from drumline.scheduler.lifecycle import State

FULL = CacheGroup(group_id="full", block_tokens=4)
HALVES = CacheGroup(group_id="halves", block_tokens=2, blocks_per_parent=3)
WINDOW = CacheGroup(
    group_id="window", kind=AttentionKind.SLIDING_WINDOW, block_tokens=4, window_tokens=4
)
STATE = CacheGroup(group_id="state", kind=AttentionKind.STATE, block_tokens=0)
SHAPES = [(FULL,), (HALVES,), (FULL, WINDOW), (FULL, STATE), (HALVES, WINDOW, STATE)]


def named(*tokens: int, parent: int | None = None) -> int:
    return event_hash(parent, np.array(tokens, np.int32).tobytes())


def ran(rig: Rig, rid: str, tokens, rounds: int = 2) -> None:
    rig.submit(rid, tokens)
    for _ in range(rounds):
        rig.round()
    rig.finish(rid)


def drained(rig: Rig) -> list[BlockStored | BlockRemoved]:
    return rig.scheduler.drain_kv_events()


def test_pages_are_named_by_the_hash_that_routers_know():
    first = named(1, 2, 3, 4)
    assert first == 15932823548972441343
    assert named(5, 6, 7, 8, parent=first) == 12482753192408519678
    assert named(9, parent=12482753192408519678) == 11909995834680820270


def test_a_prompt_is_stored_page_by_page_with_its_tail_behind_the_last():
    rig = Rig(kv_events=True)
    ran(rig, "a", 10)
    first, second = named(0, 1, 2, 3), named(4, 5, 6, 7, parent=named(0, 1, 2, 3))
    assert drained(rig)[:3] == [
        BlockStored(first, None, (0, 1, 2, 3)),
        BlockStored(second, first, (4, 5, 6, 7)),
        BlockStored(named(8, 9, parent=second), second, (8, 9)),
    ]
    assert drained(rig) == []


def test_pages_that_decoding_completes_are_stored_behind_the_prompts():
    rig = Rig(kv_events=True)
    rig.submit("a", 6)
    for _ in range(4):
        rig.round()
    stored = {event.token_ids: event.parent_hash for event in drained(rig)}
    answer = (4, 5, 6 * 7 % 50, 7 * 7 % 50)
    assert stored[answer] == named(0, 1, 2, 3)
    assert (4, 5) in stored, "the prompt's tail"


def test_nothing_is_told_twice_when_others_compute_or_find_the_same_prefix():
    rig = Rig(kv_events=True, share_in_flight=False)
    rig.submit("a", 9)
    rig.submit("b", 9)
    for _ in range(2):
        rig.round()
    hashes = [event.block_hash for event in drained(rig)]
    assert len(hashes) == len(set(hashes)) == 3
    rig.finish("a")
    ran(rig, "c", 9, rounds=1)
    assert all(event.block_hash not in hashes for event in drained(rig))


def test_a_page_is_stored_once_every_group_has_it_and_removed_with_the_first_that_goes():
    rig = Rig(groups=(FULL, HALVES), kv_events=True)
    ran(rig, "a", 9, rounds=2)
    stored = drained(rig)
    assert [event.token_ids for event in stored[:2]] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    index, pool = rig.scheduler._parts.index, rig.scheduler._pool
    prior = page_digest(b"", np.arange(4, dtype=np.int32).tobytes())
    half = index.blocks[1][index.find(prior)][1:]
    index.forget(1, half)
    pool.uncached(half)
    assert drained(rig) == [BlockRemoved(stored[0].block_hash)]
    assert index.find(prior), "the other groups have their blocks still"
    assert rig.scheduler.clear()
    removed = drained(rig)
    assert BlockRemoved(stored[0].block_hash) not in removed
    assert BlockRemoved(stored[1].block_hash) in removed


def test_what_windows_have_passed_is_not_stored():
    rig = Rig(groups=(FULL, WINDOW), kv_events=True)
    rig.submit("a", 12)
    rig.round()
    rig.round()
    assert [event.token_ids for event in drained(rig)] == [(8, 9, 10, 11)]


def test_evicted_and_cached_again_between_two_drains_is_no_event():
    rig = Rig(kv_events=True)
    ran(rig, "a", 8)
    before = {event.block_hash for event in drained(rig)}
    assert rig.scheduler.clear()
    rig.plan()
    ran(rig, "a", 8)
    assert {event.block_hash for event in drained(rig)}.isdisjoint(before)
    assert rig.scheduler.clear()
    assert {event.block_hash for event in drained(rig)} >= before


def test_a_cleared_cache_is_removed_from_the_last_page_to_the_first():
    rig = Rig(kv_events=True)
    ran(rig, "a", 12)
    stored = [event.block_hash for event in drained(rig)]
    rig.scheduler.clear()
    assert [event.block_hash for event in drained(rig)] == stored[::-1]


def test_salted_prefixes_are_not_told_of():
    rig = Rig(kv_events=True)
    rig.submit("a", 10, cache_salt="x")
    for _ in range(5):
        rig.round()
    rig.finish("a")
    assert drained(rig) == []


def test_without_readers_nothing_is_hashed_or_kept():
    rig = Rig()
    ran(rig, "a", 10)
    assert drained(rig) == []
    assert rig.scheduler._parts.index.touched is None


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(SHAPES))
@example(581, SHAPES[-1])  # a boundary whose last block comes long after its name
def test_a_reader_of_every_drain_knows_what_is_cached(seed, shape):
    chance = random.Random(seed)
    rig = Rig(groups=shape, num_pages=24, kv_events=True, prefix_caching=True)
    reader: dict[int, tuple[int, ...]] = {}
    live: list[str] = []
    for number in range(60):
        if chance.random() < 0.4:
            head = chance.randint(0, 3) * 100
            if rig.submit(f"r{number}", range(head, head + chance.randint(1, 24))) is None:
                live.append(f"r{number}")
        plan = rig.round()
        live = [rid for rid in live if rid not in {abort.rid for abort in plan.aborts}]
        if live and chance.random() < 0.4:
            rid = live.pop(chance.randrange(len(live)))
            started = rig.scheduler._requests.get(rid).state in (State.PREFILLED, State.DECODING)
            (rig.finish if started and chance.random() < 0.7 else rig.abort)(rid)
        if chance.random() < 0.02:
            rig.scheduler.clear()
        if chance.random() < 0.5:
            follow(reader, drained(rig))
    follow(reader, drained(rig))
    index, events = rig.scheduler._parts.index, rig.scheduler._kv_events
    complete = {digest for digest in index._nodes if index.complete(digest)}
    assert reader.keys() == {events._named[digest].event_hash for digest in complete}
    assert events._named.keys() <= index._nodes.keys(), "what is gone is forgotten"


def follow(reader: dict[int, tuple[int, ...]], events) -> None:
    for event in events:
        match event:
            case BlockStored():
                assert event.block_hash not in reader
                reader[event.block_hash] = event.token_ids
                tokens = np.array(event.token_ids, np.int32).tobytes()
                assert event.block_hash == event_hash(event.parent_hash, tokens)
            case BlockRemoved():
                del reader[event.block_hash]
