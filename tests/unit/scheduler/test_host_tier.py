"""Prefixes kept in host memory: how they get there, and back."""

import random

import pytest
from scheduler_rig import Rig, sampled
from test_any_order_of_events import FULL, PACKED, PACKED_STATE, SMALL_WINDOW, STATE, WINDOW

from drumline.contract.cache import CacheAck, LoadBack, Restore, Snapshot, WriteBack
from drumline.contract.plan import AbortReason, encode_plan
from drumline.core.config import WritePolicy
from drumline.core.errors import ConfigError
from drumline.scheduler.lifecycle import State

BACK = WritePolicy.WRITE_BACK


def tiered(**changes) -> Rig:
    return Rig(**({"num_host_pages": 40} | changes))


def ops(plan, kind):
    return [op for op in plan.cache_ops if isinstance(op, kind)]


def blocks(moves) -> int:
    return sum(len(part.targets) for part in moves)


def serve(rig: Rig, rid: str, tokens, rounds: int = 3) -> list:
    """Have a request answered and finished; returns the plans up to the one after its end."""
    rig.submit(rid, tokens)
    plans = [rig.round() for _ in range(rounds)]
    rig.finish(rid)
    return [*plans, rig.round()]


def settle(rig: Rig, *, ok: bool = True) -> None:
    while rig.unacknowledged:
        rig.acknowledge(ok=ok)


def kept(rig: Rig) -> int:
    """Blocks that the host tier has for whoever asks."""
    return len(rig.scheduler._host.pool.cached_blocks())


def remembered(rounds: int = 3, **changes) -> Rig:
    """A prompt of 12 tokens and its answer were served; the host tier alone still has them."""
    rig = tiered(**changes)
    serve(rig, "first", 12, rounds)
    settle(rig)
    assert rig.scheduler.clear_l1()
    return rig


def test_a_prompts_pages_are_stored_from_pinned_blocks_and_findable_after_the_acknowledgment():
    rig = tiered()
    rig.submit("a", 13)
    rig.round()
    tail = rig.pages("a")[3]
    pages, partial = ops(rig.round(), WriteBack)
    assert pages.pinned
    assert partial.pinned
    assert pages.moves[0].sources.tolist() == rig.pages("a")[:3]
    assert partial.moves[0].sources.tolist() == [tail], "which the row has moved off"
    assert kept(rig) == 0
    rig.abort("a")
    assert rig.scheduler.active_pages() == 4, "the copies still read them"
    rig.acknowledge()
    assert kept(rig) == 3
    rig.acknowledge()
    assert kept(rig) == 4
    assert rig.at_baseline()


def test_a_tail_is_loaded_to_its_readers_own_block_and_not_copied_there():
    rig = remembered(rounds=4)  # 12 tokens and an answer of which 3 are in the cache
    rig.submit("b", [*range(12), *(sampled(at) for at in range(12, 15)), 90, 91])
    plan = rig.round()
    assert rig.scheduler.cached_tokens("b") == 15
    (op,) = ops(plan, LoadBack)
    assert op.moves[0].targets.tolist() == rig.pages("b")[:4]
    assert not plan.copies
    assert not any(set(part.blocks.tolist()) & set(rig.pages("b")[:4]) for part in plan.zeroes)
    assert "15 in host memory" in rig.scheduler.explain("b")
    settle(rig)


def test_a_tail_that_fails_to_load_ends_its_reader():
    rig = remembered(rounds=4)
    rig.submit("pages", 12)
    rig.round()
    settle(rig)  # the full pages are on the device again
    rig.loads_fail = True
    rig.submit("b", [*range(12), *(sampled(at) for at in range(12, 15)), 90, 91])
    (op,) = ops(rig.round(), LoadBack)
    assert blocks(op.moves) == 1, "the tail alone"
    rig.loads_fail = False
    settle(rig)
    assert "b" in [abort.rid for abort in rig.round().aborts]


def test_a_tail_that_is_given_away_is_written_back():
    rig = tiered(num_pages=9, host_write_policy=BACK)
    serve(rig, "a", 13)
    rig.submit("b", [90 + at for at in range(25)])
    rig.round()
    settle(rig)
    rig.abort("b")
    rig.submit("c", [*range(13), 80, 81])
    plan = rig.round()
    assert rig.scheduler.cached_tokens("c") == 13
    assert rig.pages("c")[3] in ops(plan, LoadBack)[0].moves[0].targets.tolist()


def test_a_page_that_somebody_else_published_is_stored_when_a_request_with_the_same_finishes():
    rig = tiered(share_in_flight=False)
    for rid in ("ahead", "behind"):
        rig.submit(rid, 6)
        rig.round()
    for _ in range(20):
        rig.round()
        if rig.scheduler.token_size("ahead") == 10:
            break
    settle(rig)
    # Both have tokens 4 … 7 now; the one ahead was planned since and published them.
    behind = rig.scheduler._requests.get("behind").row
    assert rig.scheduler._rows.hashed[behind] == 4
    before = kept(rig)
    rig.finish("behind")
    rig.abort("ahead")
    stores = ops(rig.round(), WriteBack)
    settle(rig)
    assert stores
    assert kept(rig) > before
    assert rig.scheduler.clear_l1()
    text = [*range(6), sampled(6), sampled(7), 90]
    rig.submit("later", text)
    rig.plan()
    assert rig.scheduler.cached_tokens("later") == 8


def test_what_decoding_completes_is_stored_when_the_request_finishes():
    rig = tiered()
    rig.submit("a", 8)
    for _ in range(8):
        rig.round()
    settle(rig)
    assert kept(rig) == 2
    rig.finish("a")
    (op,) = ops(rig.round(), WriteBack)
    settle(rig)
    assert op.pinned
    assert kept(rig) == 4, "a page, and the tail behind it"


def test_an_aborted_request_stores_nothing_more():
    rig = tiered()
    rig.submit("a", 13)
    rig.plan()
    rig.abort("a")
    assert rig.plan().cache_ops == ()


def test_pages_are_not_stored_twice_neither_kept_nor_under_way():
    rig = tiered(share_in_flight=False)
    rig.submit("a", 12)
    rig.submit("b", 12)
    stores = [op for _ in range(3) for op in ops(rig.round(), WriteBack)]
    assert sum(blocks(op.moves) for op in stores) == 3
    settle(rig)
    rig.finish("a", "b")
    rig.round()
    settle(rig)
    plans = serve(rig, "c", 12)
    assert not any(ops(plan, WriteBack) for plan in plans)


def test_a_full_tier_drops_what_it_has_no_place_for():
    rig = tiered(num_host_pages=3)
    rig.submit("a", 17)
    rig.round()
    (op,) = ops(rig.round(), WriteBack)
    assert blocks(op.moves) == 2, "the start of the prefix"
    assert op.moves[0].sources.tolist() == rig.pages("a")[:2]
    rig.submit("b", [90 + at for at in range(12)])
    assert not any(ops(rig.round(), WriteBack) for _ in range(3)), "all of it is being written"


def test_pages_that_nobody_asked_for_are_replaced_before_those_that_were_matched():
    rig = remembered(num_host_pages=9)
    serve(rig, "again", 13)
    settle(rig)
    serve(rig, "other", [90 + at for at in range(9)])
    settle(rig)
    serve(rig, "third", [70 + at for at in range(9)])
    settle(rig)
    rig.scheduler.clear_l1()
    rig.submit("a", 13)
    rig.submit("b", [90 + at for at in range(10)])
    rig.plan()
    assert rig.scheduler.cached_tokens("a") == 12
    assert rig.scheduler.cached_tokens("b") == 0


def test_a_failed_store_is_forgotten():
    rig = tiered()
    serve(rig, "a", 12)
    settle(rig, ok=False)
    assert kept(rig) == 0
    assert rig.scheduler._host.pool.empty == 39
    assert rig.at_baseline()


def test_a_host_hit_is_loaded_by_the_plan_whose_forward_reads_it():
    rig = remembered()
    rig.submit("b", 14)
    plan = rig.round()
    (op,) = ops(plan, LoadBack)
    loaded = op.moves[0].targets.tolist()
    assert loaded == rig.pages("b")[:3]
    assert plan.batch.prefix_lengths.tolist() == [12]
    assert plan.batch.input_lengths.tolist() == [2]
    assert rig.scheduler.cached_tokens("b") == 12
    assert "12 in host memory" in rig.scheduler.explain("b")
    zeroed = {page for part in plan.zeroes for page in part.blocks.tolist()}
    assert not zeroed & set(loaded)


def test_a_host_hit_extends_what_the_device_has():
    rig = remembered()
    serve(rig, "short", 8)
    settle(rig)
    rig.submit("long", 14)
    (op,) = ops(rig.plan(), LoadBack)
    assert blocks(op.moves) == 1
    assert rig.scheduler.cached_tokens("long") == 12


def test_loaded_pages_are_found_on_the_device_at_once():
    rig = remembered()
    rig.submit("b", 14)
    rig.submit("c", [*range(12), 77])
    plan = rig.round()
    assert len(ops(plan, LoadBack)) == 1
    assert rig.pages("b")[:3] == rig.pages("c")[:3]


def test_a_load_holds_both_ends_until_its_acknowledgment_whoever_leaves():
    rig = remembered()
    rig.submit("b", 14)
    rig.plan()
    rig.abort("b")
    assert rig.scheduler.active_pages() == 3
    assert int(rig.scheduler._host.pool.refs.sum()) == 3
    assert not rig.scheduler.can_clear()
    settle(rig)
    assert rig.at_baseline()
    assert not rig.scheduler._host.pool.refs.any()


def test_a_second_or_unknown_acknowledgment_changes_nothing():
    rig = remembered()
    rig.submit("b", 14)
    rig.round()
    ids = [op.op_id for op in rig.unacknowledged]
    settle(rig)
    rig.scheduler.advance_head([CacheAck(op_id) for op_id in [*ids, 999]])
    rig.scheduler.check()
    rig.round()


def test_ids_of_operations_are_counted_over_all_kinds():
    rig = tiered(num_pages=9, num_snapshot_pages=20, max_retracted_requests=2)
    rig.submit("a", 9)
    rig.submit("b", [50, 51, 52, 53, 54])
    seen = []
    for _ in range(40):
        seen += rig.round().cache_ops
        settle(rig)
    assert {Snapshot, WriteBack} <= {type(op) for op in seen}
    assert [op.op_id for op in seen] == list(range(len(seen)))


def test_a_failed_load_ends_who_read_it_and_forgets_what_may_build_on_it():
    rig = remembered()
    rig.loads_fail = True
    rig.submit("b", 14)
    rig.submit("other", [90, 91, 92])
    rig.round()
    rig.loads_fail = False
    settle(rig)
    plan = rig.round()
    assert [(abort.rid, abort.reason) for abort in plan.aborts] == [("b", AbortReason.LOAD_FAILED)]
    assert rig.rids(plan) == ["other"]
    rig.submit("c", 14)
    rig.round()
    assert rig.scheduler.cached_tokens("c") == 0


def test_written_back_are_the_pages_that_a_plan_gives_away():
    rig = tiered(num_pages=9, host_write_policy=BACK)
    plans = serve(rig, "a", 13)
    assert not any(ops(plan, WriteBack) for plan in plans)
    rig.submit("b", [90 + at for at in range(25)])
    (op,) = ops(rig.plan(), WriteBack)
    assert not op.pinned
    assert kept(rig) == 0
    settle(rig)
    assert kept(rig) == blocks(op.moves) > 0


def test_clearing_the_device_keeps_the_tier_and_clearing_all_does_not():
    rig = remembered()
    assert kept(rig) == 4
    assert rig.scheduler.clear()
    assert kept(rig) == 0
    rig.submit("b", 14)
    rig.plan()
    assert rig.scheduler.cached_tokens("b") == 0


def test_nothing_is_cleared_while_a_store_is_under_way():
    rig = tiered()
    serve(rig, "a", 12)
    assert rig.unacknowledged
    cached = len(rig.scheduler._pool.cached_blocks())
    assert not rig.scheduler.clear()
    assert not rig.scheduler.clear_l1()
    assert len(rig.scheduler._pool.cached_blocks()) == cached
    settle(rig)
    assert rig.scheduler.clear()


def test_a_suspended_request_leaves_to_the_snapshot_pool_what_the_tier_has_not():
    rig = tiered(num_pages=9, num_snapshot_pages=20, max_retracted_requests=2)
    rig.submit("a", 9)
    rig.submit("b", [50, 51, 52, 53, 54])
    for _ in range(60):
        plan = rig.round()
        for op in ops(plan, Snapshot):
            stored = sum(blocks(store.moves) for store in ops(plan, WriteBack) if not store.pinned)
            assert blocks(op.moves) <= 1, "the page that is not complete"
            assert stored > 0
            image = rig.scheduler._retraction._images[op.rid]
            assert image.host[0].any()
            break
        else:
            settle(rig)
            continue
        break
    settle(rig)
    rig.finish("b")
    for _ in range(20):
        restores = ops(rig.round(), Restore)
        settle(rig)
        if restores:
            break
    assert rig.rids(rig.round()) == ["a"]
    rig.finish("a")
    rig.round()
    settle(rig)
    assert not rig.scheduler._host.pool.refs.any()


def test_nobody_is_suspended_while_a_store_under_way_will_free_the_room():
    rig = tiered(num_pages=7, num_snapshot_pages=20, max_retracted_requests=2)
    rig.submit("a", 9)
    for _ in range(2):
        rig.round()
    settle(rig)
    rig.submit("b", [50 + at for at in range(6)])
    rig.round()
    rig.round()
    rig.abort("b")  # whose page is being copied still
    plans = [rig.round() for _ in range(20)]
    assert any(plan.batch is None for plan in plans), "a waits"
    assert not any(ops(plan, Snapshot) or plan.aborts for plan in plans)
    settle(rig)
    assert rig.rids(rig.round()) == ["a"]


def test_a_tier_without_prefix_caching_is_refused():
    with pytest.raises(ConfigError, match="num_host_pages"):
        tiered(prefix_caching=False)
    with pytest.raises(ConfigError, match="num_host_pages"):
        tiered(num_host_pages=0)


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize(
    "groups",
    [
        (FULL,),
        (PACKED,),
        (FULL, WINDOW),
        (SMALL_WINDOW, PACKED_STATE),
        (PACKED, WINDOW, STATE),
    ],
    ids=["full", "packed", "window", "window and state", "all kinds"],
)
def test_conversations_read_what_they_wrote_wherever_it_went(groups, policy, failing):
    seen: dict[str, int] = {}
    for seed in range(2):
        _converse(seed, groups, policy, failing, seen)
    assert seen["WriteBack"] > 10
    assert seen["LoadBack"] > 0


class Conversation:
    """Turns of texts that grow, on two mirrored schedulers."""

    def __init__(self, seed, groups, policy):
        rng = self.rng = random.Random(seed)
        changes = {
            "groups": groups,
            "prefix_granularity": rng.choice((4, 8)),
            "num_pages": (16, 28, 40)[len(groups) - 1],
            "num_host_pages": rng.choice((5, 20, 90)) * len(groups),
            "num_snapshot_pages": rng.choice((8, 40)) * len(groups),
            "max_retracted_requests": 3,
            "debug_force_retraction_interval": rng.choice((0, 7)),
            "max_rows": 4,
            "overlap_depth": rng.randrange(2),
            "share_in_flight": rng.random() < 0.7,
            "host_write_policy": policy,
            "kv_events": rng.random() < 0.5,
        }
        self.rigs = Rig(**changes), Rig(**changes)
        self.texts = [[head * 100 + at for at in range(rng.randint(3, 20))] for head in range(9)]
        self.talking: dict[str, int] = {}

    def ask(self, rid):
        which = self.rng.choice([at for at in range(9) if at not in self.talking.values()])
        self.talking[rid] = which
        for rig in self.rigs:
            assert rig.submit(rid, self.texts[which]) is None

    def plan(self):
        one, two = self.rigs
        while len(one.in_flight) > one.config.overlap_depth:
            one.commit()
            two.commit()
        plan = one.plan()
        assert encode_plan(plan) == encode_plan(two.plan())
        assert one.scheduler.drain_kv_events() == two.scheduler.drain_kv_events()
        for abort in plan.aborts:
            del self.talking[abort.rid]
        return plan

    def end(self, rid):
        """Finish a request that decodes, or take it back, by chance."""
        scheduler = self.rigs[0].scheduler
        if scheduler._requests.get(rid).state is State.DECODING and self.rng.random() < 0.15:
            which = self.talking.pop(rid)
            asked, size = self.texts[which], scheduler.token_size(rid)
            said = [at * 7 % 50 for at in range(len(asked), size)]
            more = [self.rng.randrange(50) for _ in range(self.rng.randint(1, 6))]
            self.texts[which] = (asked + said + more) if size < 40 else asked[:5]
            for rig in self.rigs:
                rig.finish(rid)
        elif self.rng.random() < 0.02:
            del self.talking[rid]
            for rig in self.rigs:
                rig.abort(rid)

    def acknowledge(self):
        while self.rigs[0].unacknowledged and self.rng.random() < 0.5:
            at = self.rng.randrange(len(self.rigs[0].unacknowledged))
            ok = self.rng.random() < 0.95
            for rig in self.rigs:
                rig.acknowledge(at, ok=ok)

    def check_drained(self):
        rig = self.rigs[0]
        rig.abort(*self.talking)
        while rig.in_flight:
            rig.commit()
        settle(rig)
        rig.plan()
        settle(rig)
        assert rig.at_baseline()
        assert rig.scheduler.clear()
        assert rig.scheduler._host.pool.empty == rig.config.num_host_pages - 1
        assert not rig.scheduler._retraction._snapshots.pool.refs.any()


def _converse(seed, groups, policy, failing, seen) -> None:
    talk = Conversation(seed, groups, policy)
    for number in range(80):
        if talk.rng.random() < 0.3 and len(talk.talking) < 4:
            talk.ask(f"r{number}")
        for rig in talk.rigs:
            rig.loads_fail = failing and number % 5 == 0
        for op in talk.plan().cache_ops:
            seen[type(op).__name__] = seen.get(type(op).__name__, 0) + 1
        for rid in list(talk.talking):
            talk.end(rid)
        talk.acknowledge()
        if number % 10 == 0:
            assert len({rig.scheduler.clear_l1() for rig in talk.rigs}) == 1
    talk.check_drained()
