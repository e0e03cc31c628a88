"""Suspending requests when the pool is full, and bringing them back."""

import pytest
from scheduler_rig import Rig

from drumline.contract.cache import Restore, Snapshot
from drumline.contract.plan import AbortReason
from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.core.errors import ConfigError
from drumline.scheduler.config import SchedulerConfig


def crowded(**changes) -> Rig:
    """Two requests whose answers do not fit a pool of 8 pages of 4 tokens together."""
    fields = {"num_pages": 9, "num_snapshot_pages": 20, "max_retracted_requests": 2}
    rig = Rig(**(fields | changes))
    rig.submit("a", 9)
    rig.submit("b", [50, 51, 52, 53, 54])
    return rig


def run_until(rig: Rig, wanted, rounds: int = 60):
    """Plan rounds until a plan has an operation of the kind `wanted`; returns both."""
    for _ in range(rounds):
        plan = rig.round()
        for op in plan.cache_ops:
            if isinstance(op, wanted):
                return plan, op
    raise AssertionError(f"no {wanted.__name__} in {rounds} rounds")


def test_a_blocked_decode_suspends_the_request_that_frees_most():
    rig = crowded()
    plan, op = run_until(rig, Snapshot)
    assert op.rid == "a"
    assert rig.rids(plan) == ["b"], "the survivor decodes in the same plan"
    assert sum(len(part.sources) for part in op.moves) == len(set(rig.pages("a")) - {0})
    assert rig.scheduler.sizes().retracted == 1
    assert rig.scheduler.sizes().waiting == 1
    assert "retracted" in rig.scheduler.explain("a")


def test_a_suspended_request_comes_back_to_a_new_row_and_decodes_on():
    rig = crowded()
    run_until(rig, Snapshot)
    size = rig.scheduler.token_size("a")
    rig.acknowledge()
    rig.finish("b")
    plan, op = run_until(rig, Restore)
    assert op.rid == "a"
    assert plan.bound[0].rid == "a"
    assert plan.batch is None, "nobody decodes before the image is back"
    assert rig.plan().batch is None
    rig.acknowledge()
    plan = rig.round()
    assert rig.rids(plan) == ["a"]
    assert plan.batch.extends == 0
    assert rig.scheduler.token_size("a") == size + 1


def test_an_image_that_is_not_written_yet_is_not_restored():
    rig = crowded()
    run_until(rig, Snapshot)
    rig.finish("b")
    assert not rig.round().cache_ops


def test_nobody_new_is_admitted_before_the_suspended():
    rig = crowded()
    run_until(rig, Snapshot)
    rig.submit("c", 1)
    plan = rig.round()
    assert "c" not in rig.rids(plan)


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        (
            {"num_snapshot_pages": 1, "max_retracted_requests": 0},
            AbortReason.OUT_OF_PAGES,
            "none of 8 pages is free for a decode",
        ),
        (
            {"num_snapshot_pages": 2},
            AbortReason.IMAGE_DOES_NOT_FIT,
            "the snapshot pool has 1 free pages",
        ),
    ],
)
def test_without_a_place_for_the_image_the_newest_is_aborted_with_the_reason(changes, reason, said):
    rig = crowded(**changes)
    aborts = ()
    while not aborts:
        aborts = rig.round().aborts
    assert (aborts[0].rid, aborts[0].reason) == ("b", reason)
    assert said in aborts[0].detail


def test_a_request_with_results_outstanding_is_not_suspended():
    rig = crowded(overlap_depth=1)
    for _ in range(60):
        owing = {row for batch in rig.in_flight for row in batch.rows.tolist()}
        plan = rig.plan()
        if plan.cache_ops:
            assert plan.cache_ops[0].row not in owing
            return
        while len(rig.in_flight) > (1 if plan.batch is not None else 0):
            rig.commit()
    raise AssertionError("nobody was suspended")


@pytest.mark.parametrize("end", ["finish", "abort"])
@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_suspended_request_that_ends_gives_its_image_back(end, acknowledged):
    rig = crowded()
    run_until(rig, Snapshot)
    if acknowledged:
        rig.acknowledge()
    getattr(rig, end)("a")
    rig.abort("b")
    if not acknowledged:
        rig.acknowledge()
    assert rig.scheduler._retraction._snapshots.pool.empty == 19
    assert rig.at_baseline()


def test_a_restored_blocks_stay_held_until_the_copy_is_done_even_if_the_request_ends():
    rig = crowded()
    run_until(rig, Snapshot)
    rig.acknowledge()
    rig.finish("b")
    run_until(rig, Restore)
    rig.abort("a")
    assert not rig.at_baseline()
    rig.acknowledge()
    assert rig.at_baseline()


def test_an_image_that_failed_aborts_its_request():
    rig = crowded()
    run_until(rig, Snapshot)
    rig.acknowledge(ok=False)
    aborts = rig.round().aborts
    assert [one.rid for one in aborts] == ["a"]
    assert "could not be written" in aborts[0].detail


@pytest.mark.parametrize("ended", [False, True])
def test_an_image_that_does_not_come_back_aborts_its_request_unless_it_ended(ended):
    rig = crowded()
    run_until(rig, Snapshot)
    rig.acknowledge()
    rig.finish("b")
    run_until(rig, Restore)
    rig.acknowledge(ok=False)
    if ended:
        rig.abort("a")
    aborts = rig.round().aborts
    assert [one.rid for one in aborts] == ([] if ended else ["a"])
    assert rig.at_baseline()


def test_forced_retraction_changes_no_answer():
    rig = crowded(num_pages=40, debug_force_retraction_interval=3)
    suspended = 0
    for _ in range(40):
        plan = rig.round()
        suspended += sum(isinstance(op, Snapshot) for op in plan.cache_ops)
        while rig.unacknowledged:
            rig.acknowledge()
    assert suspended > 3
    assert rig.scheduler.token_size("a") > 20


def test_an_image_has_what_a_window_looks_back_on_once_no_draft_is_in_flight():
    window = CacheGroup(
        group_id="window", kind=AttentionKind.SLIDING_WINDOW, block_tokens=4, window_tokens=6
    )
    rig = crowded(
        groups=(window,),
        num_pages=40,
        prefix_caching=False,
        decode_tokens=3,
        overlap_depth=1,
        debug_force_retraction_interval=3,
    )
    restored = 0
    for _ in range(40):
        plan = rig.round()
        restored += sum(isinstance(op, Restore) for op in plan.cache_ops)
        while rig.unacknowledged:
            rig.acknowledge()
    assert restored > 3


def test_a_repeated_acknowledgment_is_ignored():
    rig = crowded()
    _plan, op = run_until(rig, Snapshot)
    rig.acknowledge()
    rig.unacknowledged.append(op)
    rig.acknowledge()


def test_a_pool_for_images_without_a_limit_is_refused_by_name():
    with pytest.raises(ConfigError, match="num_snapshot_pages"):
        SchedulerConfig(
            groups=Rig().config.groups,
            num_pages=9,
            prefix_granularity=4,
            max_rows=1,
            max_scheduled_tokens=4,
            num_snapshot_pages=4,
        )
