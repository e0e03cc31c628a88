"""The fake plane's host tiers: what is moved too early, too late or to the wrong place shows."""

from itertools import islice

import numpy as np
import pytest

from drumline.contract.cache import BlockMoves, CacheAck, LoadBack, Restore, Snapshot, WriteBack
from drumline.contract.plan import Batch, Bound, PageZeroes, Plan, TablePatch
from drumline.contract.ports import Dispatch
from drumline.contract.request import Admission, Sampling
from drumline.core.errors import InvariantError
from drumline.replay.arithmetic import answer
from drumline.replay.plane import PagedPlane
from drumline.replay.simulator import small_specs

SPECS = small_specs(num_host_pages=9, num_snapshot_pages=5, max_retracted_requests=2)
PROMPT = list(range(10, 16))
OTHER = list(range(30, 37))
TOKENS = list(islice(answer(PROMPT, 3, 512), 4))


def ints(*values):
    return np.array(values, np.int32)


def moves(sources, targets):
    return (BlockMoves(0, ints(*sources), ints(*targets)),)


def place(row, *blocks):
    columns = np.arange(len(blocks), dtype=np.int32)
    return TablePatch(0, np.full(len(blocks), row, np.int32), columns, ints(*blocks))


def prefill(rid, row, prompt, **fields):
    batch = Batch(
        rows=ints(row),
        generations=ints(1),
        input_lengths=ints(len(prompt)),
        prefix_lengths=ints(0),
        extends=1,
        extend_ids=ints(*prompt),
        prompt_lengths=ints(len(prompt)),
    )
    return Plan(round=1, bound=(Bound(row, 1, rid),), batch=batch, **fields)


def decode(row, before, **fields):
    batch = Batch(
        rows=ints(row),
        generations=ints(1),
        input_lengths=ints(1),
        prefix_lengths=ints(before),
    )
    return Plan(round=2, batch=batch, **fields)


def plane(**fields):
    made = PagedPlane(SPECS, **fields)
    made.admit(
        [
            Admission(rid="a", prompt_tokens=6, sampling=Sampling(seed=3)),
            Admission(rid="b", prompt_tokens=7, sampling=Sampling(seed=4)),
        ]
    )
    return made


def run(plane, plan):
    return plane.complete(plane.execute(plan, Dispatch())).tokens.tolist()


def suspended(plane):
    """Suspend `a` after two tokens while `b` takes its row and blocks; returns what `a` said."""
    said = run(plane, prefill("a", 1, PROMPT, patches=(place(1, 7, 3),)))
    said += run(plane, decode(1, 6))
    ops = (
        WriteBack(0, moves([7], [4]), pinned=False),
        Snapshot(1, "a", 1, 2, moves([3], [1])),
    )
    zeroes = (PageZeroes(0, ints(3, 7)),)
    patches = (place(1, 3, 7),)
    run(plane, prefill("b", 1, OTHER, cache_ops=ops, zeroes=zeroes, patches=patches))
    assert plane.poll_cache_acks() == [CacheAck(0), CacheAck(1)]
    return said


def back(slot=2, host=4, snapshot=1):
    """The plan that brings `a` back to row 2."""
    op = Restore(2, "a", 2, slot, moves([host], [9]), moves([snapshot], [2]))
    return Plan(round=3, cache_ops=(op,), bound=(Bound(2, 1, "a"),), patches=(place(2, 9, 2),))


def test_a_suspended_request_goes_on_once_it_is_restored():
    tiers = plane()
    said = suspended(tiers)
    tiers.execute(back(), Dispatch())
    assert tiers.poll_cache_acks() == [CacheAck(2)]
    said += run(tiers, decode(2, 7)) + run(tiers, decode(2, 8))
    assert said == TOKENS


def test_a_restore_that_is_not_acknowledged_has_brought_nothing():
    tiers = plane(delay=lambda op: 2 if op.op_id == 2 else 0)
    suspended(tiers)
    tiers.execute(back(), Dispatch())
    assert tiers.poll_cache_acks() == []
    with pytest.raises(KeyError):
        run(tiers, decode(2, 7))


@pytest.mark.parametrize("wrong", [{"host": 5}, {"snapshot": 2}])
def test_a_restore_from_the_wrong_place_changes_what_follows(wrong):
    tiers = plane()
    said = suspended(tiers)
    tiers.execute(back(**wrong), Dispatch())
    tiers.poll_cache_acks()
    assert said + run(tiers, decode(2, 7)) != TOKENS[:3]


def test_a_slot_that_is_not_there_or_the_null_block_is_refused():
    tiers = plane()
    suspended(tiers)
    tiers.execute(back(slot=3), Dispatch())
    with pytest.raises(InvariantError, match="blob slot 3 of 2"):
        tiers.poll_cache_acks()
    with pytest.raises(InvariantError, match="names the null block"):
        tiers.execute(
            Plan(round=9, cache_ops=(WriteBack(8, moves([0], [1]), pinned=False),)), Dispatch()
        )


def test_a_pinned_store_carries_off_what_its_block_holds_at_the_end():
    tiers = plane(delay=lambda op: 1)
    run(tiers, prefill("a", 1, PROMPT, patches=(place(1, 7, 3),)))
    store = (WriteBack(0, moves([7], [1]), pinned=True),)
    tiers.execute(Plan(round=2, cache_ops=store), Dispatch())
    assert tiers.poll_cache_acks() == []
    held = tiers._slots[0][7].copy()
    tiers._slots[0][7] = 5
    assert tiers.poll_cache_acks() == [CacheAck(0)]
    tiers.execute(Plan(round=3, cache_ops=(LoadBack(1, moves([1], [8])),)), Dispatch())
    assert (tiers._slots[0][8] == 5).all()
    assert not (held == 5).all()


def test_a_failing_operation_moves_nothing_and_says_so():
    tiers = plane(failing=lambda op: op.op_id == 0)
    tiers.execute(
        Plan(round=1, cache_ops=(WriteBack(0, moves([7], [1]), pinned=False),)), Dispatch()
    )
    assert tiers.poll_cache_acks() == [CacheAck(0, ok=False)]
