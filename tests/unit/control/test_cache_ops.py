"""A replica learns that a copy is done when every member's has landed, and in the same round."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.members import Members

from drumline.collective.in_process import run_ranks
from drumline.collective.solo import SoloGroup
from drumline.contract.cache import BlockMoves, CacheAck, LoadBack, Restore, Snapshot, WriteBack
from drumline.contract.census import TierCounters
from drumline.contract.ports import Reduce
from drumline.control.cache_ops import CacheOps
from drumline.core.errors import InvariantError, PeerError
from drumline.replay.simulator import small_specs

SPECS = small_specs(block_tokens=4)
ROUNDS = 12


def moves(count):
    blocks = np.arange(1, count + 1, dtype=np.int32)
    return (BlockMoves(0, blocks, blocks),)


def stores(*op_ids):
    return [WriteBack(op_id, moves(1), pinned=True) for op_id in op_ids]


class Counting:
    """A group that counts its exchanges."""

    def __init__(self, group):
        self.group, self.size, self.index = group, group.size, group.index
        self.reduced = self.gathered = 0

    def all_reduce(self, values, how):
        self.reduced += 1
        return self.group.all_reduce(values, how)

    def all_gather(self, payload):
        self.gathered += 1
        return self.group.all_gather(payload)


@given(
    landed=st.integers(1, 6).flatmap(
        lambda ops: st.lists(
            st.lists(
                st.tuples(st.integers(1, ROUNDS - 1), st.booleans()), min_size=ops, max_size=ops
            ),
            min_size=1,
            max_size=4,
        )
    ),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=60, deadline=None)
def test_an_acknowledgment_waits_for_the_slowest_member(landed, seed):
    size, ops = len(landed), len(landed[0])

    def main(mesh):
        group = Counting(mesh.group(range(size), "replica"))
        cache_ops = CacheOps(group, SPECS)
        cache_ops.dispatched(stores(*range(ops)))
        mine = landed[mesh.index]
        learnt = []
        for now in range(ROUNDS):
            if not cache_ops.open:
                break
            polled = [CacheAck(op, ok) for op, (when, ok) in enumerate(mine) if when == now]
            learnt += [(now, ack) for ack in cache_ops.acknowledged(polled)]
        assert not cache_ops.open
        return learnt, group.reduced, group.gathered, cache_ops.counters.failed

    slowest = [max(member[op][0] for member in landed) for op in range(ops)]
    good = [all(member[op][1] for member in landed) for op in range(ops)]
    expected = sorted((slowest[op], op, good[op]) for op in range(ops))
    results = run_ranks(size, main, seed)
    for learnt, reduced, gathered, failed in results:
        assert [(now, ack.op_id, ack.ok) for now, ack in learnt] == expected
        assert failed == good.count(False)
        # Everybody is in every exchange, and none is entered once nothing is open.
        assert (reduced, gathered) == results[0][1:3]
        assert reduced == (max(slowest) + 1 if size > 1 else 0)


def test_rounds_in_which_nothing_landed_gather_nothing():
    def main(mesh):
        group = Counting(mesh.group(range(3), "replica"))
        cache_ops = CacheOps(group, SPECS)
        cache_ops.dispatched(stores(0))
        assert [cache_ops.acknowledged([]) for _ in range(5)] == [[]] * 5
        return group.reduced, group.gathered

    assert run_ranks(3, main) == [(5, 0)] * 3


@pytest.mark.parametrize(
    ("polled", "said"),
    [
        ([CacheAck(1), CacheAck(1)], "cache operation 1 is acknowledged twice"),
        ([CacheAck(9)], "cache operation 9 is acknowledged and not open"),
        ([CacheAck(1), CacheAck(2), CacheAck(2, ok=False)], "operation 2 is acknowledged twice"),
    ],
)
def test_a_repeated_or_unknown_acknowledgment_stops_every_member_alike(polled, said):
    members = Members(3)
    all_ops = [CacheOps(seat, SPECS) for seat in members.seats]
    for cache_ops in all_ops:
        cache_ops.dispatched(stores(1, 2))
    theirs = [[], polled, [CacheAck(1)]]
    errors = members.all(
        [
            lambda ops=ops, acks=acks: ops.acknowledged(acks)
            for ops, acks in zip(all_ops, theirs, strict=True)
        ]
    )
    assert all(isinstance(error, InvariantError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("member 1 of the replica: ")
    assert said in str(errors[0])


def test_a_member_that_sends_something_else_is_named():
    members = Members(2)
    cache_ops = CacheOps(members.seats[0], SPECS)
    cache_ops.dispatched(stores(1))

    def other():
        members.seats[1].all_reduce([1], Reduce.MAX)
        members.seats[1].all_gather(b"no view")

    error, _ = members.all([lambda: cache_ops.acknowledged([CacheAck(1)]), other])
    assert isinstance(error, PeerError)
    assert str(error).startswith("member 1 sent no view of its cache operations: ")


def test_an_acknowledgment_that_comes_again_rounds_later_is_one_too_many():
    cache_ops = CacheOps(SoloGroup(), SPECS)
    cache_ops.dispatched(stores(0, 1))
    assert cache_ops.acknowledged([CacheAck(0)]) == [CacheAck(0)]
    with pytest.raises(InvariantError, match="operation 0 is acknowledged and not open"):
        cache_ops.acknowledged([CacheAck(0)])


def test_an_operation_is_dispatched_once():
    cache_ops = CacheOps(SoloGroup(), SPECS)
    cache_ops.dispatched(stores(4))
    with pytest.raises(InvariantError, match="names cache operation 4 a second time"):
        cache_ops.dispatched(stores(4))


def test_every_tier_counts_what_went_in_and_out():
    cache_ops = CacheOps(SoloGroup(), SPECS)
    cache_ops.dispatched(
        [
            WriteBack(0, moves(5), pinned=True),
            WriteBack(1, moves(2), pinned=False),
            Snapshot(2, "a", 1, 1, moves(3)),
            LoadBack(3, moves(4)),
            Restore(4, "a", 1, 1, moves(2), moves(3)),
            WriteBack(5, moves(9), pinned=True),
        ]
    )
    cache_ops.acknowledged([CacheAck(op) for op in range(5)] + [CacheAck(5, ok=False)])
    counters = cache_ops.counters
    page = SPECS.bytes_per_page
    assert counters.host == TierCounters(7, 7 * page, 6, 6 * page)
    assert counters.snapshot == TierCounters(3, 3 * page, 3, 3 * page)
    assert counters.hit_tokens == 16
    assert (counters.retractions, counters.restores, counters.failed) == (1, 1, 1)
