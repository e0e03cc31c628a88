"""The parts of the storage tier by themselves: stages, the gate, what is known, operations."""

import numpy as np
import pytest
from storage_rig import LIMITS, StorageRig, limits

from drumline.contract.storage import StorageDone, StorageKey, StoragePressure
from drumline.core.errors import ConfigError, InvariantError
from drumline.scheduler.draft import Draft
from drumline.scheduler.storage.fetch import STAGES, Stage, Turn
from drumline.scheduler.storage.gate import PressureGate
from drumline.scheduler.storage.objects import KnownObjects
from drumline.scheduler.storage.operations import Operations

TURNS = [
    # stage           turn           next stage
    (Stage.ASKING, Turn.HITS, Stage.FOUND),
    (Stage.ASKING, Turn.MISSES, Stage.OVER),
    (Stage.ASKING, Turn.GIVEN_UP, Stage.OVER),
    (Stage.FOUND, Turn.STARTED, Stage.FETCHING),
    (Stage.FOUND, Turn.MISSES, Stage.OVER),
    (Stage.FOUND, Turn.GIVEN_UP, Stage.OVER),
    (Stage.FETCHING, Turn.READ, Stage.READY),
    (Stage.FETCHING, Turn.MISSES, Stage.OVER),
    (Stage.FETCHING, Turn.GIVEN_UP, Stage.OVER),
    (Stage.READY, Turn.GIVEN_UP, Stage.OVER),
]
KEYS = tuple(StorageKey(0, bytes([at]) * 32) for at in range(4))


def test_a_fetch_goes_from_stage_to_stage_and_by_no_other_way():
    assert {(stage, turn): after for stage, turn, after in TURNS} == STAGES


def test_an_illegal_turn_names_request_turn_and_stage():
    rig = StorageRig()
    rig.tick()
    rig.rig.submit("a", 9)
    rig.plan()
    fetch = rig.scheduler._storage.prefetches._fetches["a"]
    with pytest.raises(InvariantError, match=r"request a: READ is illegal in stage ASKING"):
        fetch.turn(Turn.READ)
    assert fetch.stage is Stage.ASKING


@pytest.mark.parametrize("field", ["queued_operations", "queued_bytes", "oldest_operation_us"])
def test_the_gate_closes_at_any_high_mark_and_opens_when_all_are_low(field):
    gate = PressureGate(StoragePressure(10, 10, 10), StoragePressure(2, 2, 2))
    seen = []
    for value in (9, 10, 9, 3, 2, 9, 11, 0):
        gate.update(StoragePressure(**{field: value}))
        seen.append(gate.closed)
    assert seen == [False, True, True, True, False, False, True, False]
    gate.update(StoragePressure(10, 0, 0))
    gate.update(StoragePressure(0, 3, 0))
    assert gate.closed


def test_the_oldest_facts_of_objects_are_forgotten_first():
    known = KnownObjects(2)
    known.learn(KEYS[0], stored=False)
    known.learn(KEYS[1], stored=True)
    assert (known.bad, known.is_bad(KEYS[0]), known.stored(KEYS[1])) == (1, True, True)
    known.learn(KEYS[2], stored=True)
    assert (known.bad, known.is_bad(KEYS[0])) == (0, False)
    known.learn(KEYS[1], stored=False)  # is the newest now
    known.learn(KEYS[3], stored=True)
    assert not known.stored(KEYS[2])
    assert known.is_bad(KEYS[1])


@pytest.fixture
def operations():
    return Operations(StorageRig().scheduler._host)


def test_an_answer_reaches_who_asked_once_and_later_ones_are_ignored(operations):
    told = []
    op_id = operations.query(KEYS, lambda _blocks, done: told.append(done), Draft(1))
    done = StorageDone(op_id=op_id, success=(True,) * 4)
    for _ in range(2):
        operations.answer(done)
    operations.answer(StorageDone(op_id=77, success=(True,)))
    assert told == [done]
    assert len(operations) == 0


def test_an_answer_about_other_keys_is_an_error(operations):
    op_id = operations.query(KEYS, lambda _blocks, _done: None, Draft(1))
    with pytest.raises(InvariantError, match="operation 1 has 4 keys, its answer is about 3"):
        operations.answer(StorageDone(op_id=op_id, success=(True,) * 3))
    assert len(operations) == 1


def test_a_cancelled_operation_holds_its_blocks_until_it_is_retired(operations):
    pool = operations._host.pool
    blocks = pool.take(0, 4)
    told = []
    op_id = operations.get(KEYS, blocks, lambda _blocks, done: told.append(done), Draft(1))
    operations.cancel(op_id)
    draft = Draft(2)
    operations.plan_cancels(draft)
    assert [op.op_id for op in draft.done(None).storage_ops] == [op_id]
    assert pool.refs[blocks].all()
    operations.answer(StorageDone(op_id=op_id, success=(True,) * 4))
    assert not pool.refs[blocks].any()
    assert told == []


def test_no_proof_of_retirement_quarantines_blocks_until_there_is_one(operations):
    pool = operations._host.pool
    blocks, told = pool.take(0, 4), []
    op_id = operations.get(KEYS, blocks, lambda _blocks, done: told.append(done.success), Draft(1))
    operations.answer(StorageDone(op_id=op_id, success=(True,) * 4, retired=False))
    assert told == [(False,) * 4]
    assert (operations.quarantined, operations.unanswered, operations.held) == (1, 0, 4)
    assert pool.refs[blocks].all()
    operations.check()
    operations.answer(StorageDone(op_id=op_id, success=(True,) * 4))
    assert not pool.refs[blocks].any()
    assert (len(operations), operations.held, len(told)) == (0, 0, 1)


def test_a_cancel_that_the_answer_overtakes_is_not_planned(operations):
    op_id = operations.query(KEYS, lambda _blocks, _done: None, Draft(1))
    operations.cancel(op_id)
    operations.answer(StorageDone(op_id=op_id, success=(False,) * 4))
    draft = Draft(2)
    operations.plan_cancels(draft)
    assert draft.done(None).storage_ops == ()


def test_blocks_are_named_as_their_groups_number_them(operations):
    draft = Draft(1)
    blocks = np.concatenate([operations._host.pool.take(0, 2)])
    operations.put(KEYS[:2], blocks, lambda _blocks, _done: None, draft)
    (op,) = draft.done(None).storage_ops
    assert op.blocks == (1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_operations": 0}, "storage.max_operations"),
        ({"min_prefetch_tokens": 0}, "storage.min_prefetch_tokens"),
        ({"min_prefetch_tokens": 9, "max_prefetch_tokens": 8}, "storage.max_prefetch_tokens"),
        ({"wait_timeout_us": 0}, "storage.wait_timeout_us"),
        ({"pressure_low": StoragePressure(10, 0, 0)}, r"storage.pressure_low.queued_operations"),
        ({"pressure_low": StoragePressure(0, -1, 0)}, r"storage.pressure_low.queued_bytes"),
    ],
)
def test_limits_that_do_not_fit_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        limits(**changes)


def test_storage_needs_more_host_memory_than_its_operations_hold():
    with pytest.raises(ConfigError, match=r"storage.max_host_blocks.*32 blocks"):
        StorageRig(num_host_pages=LIMITS["max_host_blocks"])
