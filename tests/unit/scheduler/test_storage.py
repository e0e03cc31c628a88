"""Prompts that storage has are asked for, read, loaded; pages are stored; waits end."""

import pytest
from storage_rig import StorageRig, limits

from drumline.contract.cache import LoadBack
from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.contract.storage import (
    StorageCancel,
    StorageGet,
    StoragePressure,
    StoragePut,
    StorageQuery,
)
from drumline.core.errors import InvariantError
from drumline.scheduler.lifecycle import State

HIGH, BETWEEN = StoragePressure(10, 0, 0), StoragePressure(5, 0, 0)


@pytest.fixture
def rig():
    """Storage that may be asked, with nothing in it."""
    rig = StorageRig()
    rig.tick()
    return rig


@pytest.fixture
def stored():
    """Storage that has the pages of the prompt 0 … 16, and tiers that have nothing."""
    rig = StorageRig()
    rig.tick()
    rig.run("old", 17)
    assert len(rig.objects) == 4
    rig.forget_locally()
    return rig


def kinds(plan):
    return [type(op) for op in plan.storage_ops]


def state(rig, rid):
    return rig.scheduler._requests.get(rid).state


# -- asking, reading, loading, storing ------------------------------------------------


def test_a_prompt_in_storage_is_asked_for_read_loaded_and_not_computed(stored):
    stored.rig.submit("a", 17)
    plan = stored.plan()
    (query,) = plan.storage_ops
    assert isinstance(query, StorageQuery)
    assert [key.digest for key in query.keys] == stored.scheduler._requests.get("a").digests[:]
    assert plan.batch is None
    assert stored.scheduler.sizes().waiting == 1
    stored.answer()
    plan = stored.plan()
    (get,) = plan.storage_ops
    assert isinstance(get, StorageGet)
    assert (get.keys, plan.batch) == (query.keys, None)
    assert stored.scheduler.storage_stats().held_blocks == 4
    stored.answer()
    plan = stored.round()
    assert kinds(plan) == []
    (load,) = plan.cache_ops
    assert isinstance(load, LoadBack)
    assert plan.batch.prefix_lengths.tolist() == [16]
    assert plan.batch.input_lengths.tolist() == [1]
    assert stored.scheduler.storage_stats().held_blocks == 0


def test_pages_that_reach_host_memory_are_stored_once(rig):
    rig.rig.submit("a", 17)
    rig.plan()
    rig.answer()  # nothing there
    rig.round()
    plan = rig.round()
    assert kinds(plan) == [], "host memory does not have them yet"
    rig.rig.acknowledge()
    (put,) = rig.plan().storage_ops
    assert isinstance(put, StoragePut)
    assert len(put.keys) == 4
    rig.answer()
    assert set(put.keys) == set(rig.objects)
    assert kinds(rig.round()) == []
    rig.rig.finish("a")
    rig.catch_up()
    rig.rig.submit("b", 17)
    assert kinds(rig.round()) == [], "cached pages are not asked for"


def test_other_requests_run_while_one_waits_for_storage(stored):
    stored.rig.submit("a", 17)
    stored.plan()
    stored.rig.submit("b", [900, 901, 902])  # too short to have a page
    plan = stored.round()
    assert stored.rig.rids(plan) == ["b"]
    assert state(stored, "a") is State.PREFETCHING


def test_who_comes_back_from_storage_goes_before_who_was_submitted_later():
    rig = StorageRig(max_scheduled_tokens=8)
    rig.tick()
    rig.rig.submit("a", 17)
    rig.plan()
    rig.tick(storage=False)
    rig.rig.submit("b", range(100, 109))
    rig.answer()
    assert rig.rig.rids(rig.round())[0] == "a"


def test_a_short_prompt_is_not_asked_for():
    rig = StorageRig(limits(min_prefetch_tokens=12))
    rig.tick()
    rig.rig.submit("a", 12)  # 11 tokens at most may come from a cache
    assert kinds(rig.round()) == []
    rig.rig.submit("b", range(50, 63))
    assert kinds(rig.round()) == [StorageQuery]


def test_no_more_is_asked_for_than_fits_an_operation():
    rig = StorageRig(limits(max_keys_per_operation=3))
    rig.tick()
    rig.rig.submit("a", 30)
    (query,) = rig.plan().storage_ops
    assert len(query.keys) == 3


def test_no_more_is_asked_for_than_may_be_fetched():
    rig = StorageRig(limits(max_prefetch_tokens=8))
    rig.tick()
    rig.rig.submit("a", 30)
    (query,) = rig.plan().storage_ops
    assert len(query.keys) == 2


# -- in part -----------------------------------------------------------------------------


def test_only_the_leading_run_of_what_was_found_is_read(stored):
    stored.rig.submit("a", 17)
    stored.plan()
    stored.answer(success=[True, True, False, True])
    (get,) = stored.plan().storage_ops
    assert len(get.keys) == 2


def test_pages_that_could_not_be_read_are_computed(stored):
    stored.rig.submit("a", 17)
    stored.plan()
    stored.answer()
    stored.plan()
    stored.answer(success=[True, False, True, True])
    plan = stored.round()
    assert plan.batch.prefix_lengths.tolist() == [4]


def test_a_request_of_which_storage_has_nothing_is_admitted_at_once(rig):
    rig.rig.submit("a", 17)
    rig.plan()
    rig.answer()
    plan = rig.round()
    assert kinds(plan) == []
    assert plan.batch.input_lengths.tolist() == [17]


def test_only_as_much_is_read_as_host_memory_has_blocks_to_spare():
    rig = StorageRig(limits(max_host_blocks=4))
    rig.tick()
    rig.rig.submit("a", 25)
    rig.plan()
    rig.answer(success=[True] * 6)
    (get,) = rig.plan().storage_ops
    assert len(get.keys) == 4
    rig.rig.submit("b", range(100, 125))
    rig.plan()
    rig.answer(max(rig.open), success=[True] * 6)
    assert kinds(rig.round()) == [], "no block is to spare"
    assert state(rig, "b") is not State.PREFETCHING


def test_a_window_group_is_read_as_far_as_the_boundary_looks_back():
    window = CacheGroup(
        group_id="w", kind=AttentionKind.SLIDING_WINDOW, block_tokens=4, window_tokens=6
    )
    groups = (CacheGroup(group_id="full", block_tokens=4), window)
    rig = StorageRig(groups=groups, num_pages=64)
    rig.tick()
    rig.run("old", 17)
    rig.forget_locally()
    rig.rig.submit("a", 17)
    (query,) = rig.plan().storage_ops
    assert [key.group for key in query.keys].count(0) == 4
    rig.answer()
    (get,) = rig.plan().storage_ops
    assert sorted(key.group for key in get.keys) == [0, 0, 0, 0, 1, 1]
    rig.answer()
    plan = rig.round()
    assert plan.batch.prefix_lengths.tolist() == [16]


# -- time ----------------------------------------------------------------------------------


def test_nothing_is_asked_for_before_a_tick_allows_it():
    rig = StorageRig()
    rig.rig.submit("a", 17)
    assert kinds(rig.round()) == []
    rig = StorageRig()
    rig.tick(storage=False)
    rig.rig.submit("a", 17)
    plan = rig.round()
    assert kinds(plan) == []
    assert plan.batch is not None


@pytest.mark.parametrize("reading", [False, True])
def test_a_request_that_waited_long_enough_is_admitted_without_storage(stored, reading):
    stored.rig.submit("a", 17)
    stored.plan()
    if reading:
        stored.answer()
        stored.plan()
    (op_id,) = stored.open
    stored.tick(999)
    assert stored.plan().batch is None
    stored.tick(1)
    plan = stored.round()
    assert plan.storage_ops == (StorageCancel(op_id),)
    assert plan.batch.input_lengths.tolist() == [17]
    stats = stored.scheduler.storage_stats()
    assert (stats.wait_timeouts, stats.held_blocks) == (1, 4 if reading else 0)
    assert not stored.scheduler.can_clear()
    stored.answer()  # late, and of no use
    assert stored.scheduler.storage_stats().operations == 0
    assert stored.scheduler.storage_stats().held_blocks == 0


def test_what_was_fetched_is_held_for_a_request_only_so_long(stored):
    stored.rig.submit("a", 17)
    stored.plan()
    stored.answer()
    stored.plan()
    stored.tick(1, forward=False)
    stored.answer()
    stored.plan()
    stats = stored.scheduler.storage_stats()
    assert (stats.ready_requests, stats.held_blocks) == (1, 4)
    stored.tick(500, forward=False)
    stored.plan()
    stats = stored.scheduler.storage_stats()
    assert (stats.ready_requests, stats.held_blocks, stats.ready_expirations) == (0, 0, 1)
    stored.tick()
    assert stored.round().batch.prefix_lengths.tolist() == [16], "host memory has it still"


def test_a_frozen_tick_leaves_no_forward_and_lets_cancels_through(stored):
    stored.rig.submit("a", 17)
    stored.rig.submit("b", [1, 2])
    stored.tick(forward=False)
    plan = stored.plan()
    assert kinds(plan) == [StorageQuery]
    stored.tick(1000, forward=False, storage=False)
    plan = stored.plan()
    assert (kinds(plan), plan.batch) == ([StorageCancel], None)
    stored.tick()
    assert stored.rig.rids(stored.round()) == ["a", "b"]


def test_time_that_goes_back_is_an_error(rig):
    rig.tick(5)
    with pytest.raises(InvariantError, match="from 5 us back to 4 us"):
        rig.tick(-1)


# -- pressure ------------------------------------------------------------------------------


def test_the_gate_closes_at_the_high_mark_and_opens_at_the_low_one(stored):
    stored.tick(pressure=HIGH)
    stored.rig.submit("a", 17)
    plan = stored.round()
    assert kinds(plan) == []
    assert plan.batch is not None
    stored.tick(pressure=BETWEEN)
    stored.rig.submit("b", range(100, 117))
    assert kinds(stored.round()) == []
    assert stored.scheduler.storage_stats().pressure_bypasses == 2
    stored.tick()
    stored.rig.submit("c", range(200, 217))
    assert StorageQuery in kinds(stored.round())


def test_pressure_ends_questions_and_lets_reading_go_on(stored):
    stored.rig.submit("a", 17)
    stored.plan()
    stored.answer()
    stored.rig.submit("b", range(100, 117))
    assert kinds(stored.plan()) == [StorageGet, StorageQuery]
    stored.tick(pressure=HIGH)
    plan = stored.round()
    assert kinds(plan) == [StorageCancel]
    assert stored.rig.rids(plan) == ["b"]
    assert state(stored, "a") is State.PREFETCHING


def test_pages_are_not_stored_under_pressure(rig):
    rig.tick(storage=False)
    rig.rig.submit("a", 17)
    rig.round()
    rig.round()
    rig.rig.acknowledge()
    rig.tick(pressure=HIGH)
    assert kinds(rig.round()) == []
    rig.tick()
    assert kinds(rig.round()) == []
    assert rig.scheduler.storage_stats().pressure_drops == 4


def test_pages_wait_to_be_stored_until_that_is_allowed(rig):
    rig.tick(storage=False)
    rig.rig.submit("a", 17)
    rig.round()
    rig.round()
    rig.rig.acknowledge()
    assert kinds(rig.round()) == []
    assert rig.scheduler.storage_pending
    rig.tick()
    assert kinds(rig.round()) == [StoragePut]


# -- ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(4))
def test_an_abort_while_storage_works_ends_the_request_and_keeps_the_memory(stored, steps):
    stored.rig.submit("a", 17)
    if steps > 0:
        stored.plan()
    if steps > 1:
        stored.answer()
        stored.plan()
    if steps > 2:
        stored.answer()
    stored.rig.abort("a")
    assert stored.scheduler.sizes().waiting == 0
    held = stored.scheduler.storage_stats().held_blocks
    assert held == (4 if steps == 2 else 0)
    assert kinds(stored.plan()) == ([StorageCancel] if steps in (1, 2) else [])
    assert not stored.scheduler.knows("a")
    stored.catch_up()
    assert stored.scheduler.storage_stats().held_blocks == 0
    assert stored.scheduler.clear()


def test_a_detached_request_is_admitted_with_what_there_is(stored):
    stored.rig.submit("a", 17)
    stored.plan()
    stored.detach("a")
    stored.detach("nobody")
    plan = stored.round()
    assert kinds(plan) == [StorageCancel]
    assert plan.batch.input_lengths.tolist() == [17]


def test_a_request_is_brought_back_once_however_many_ways_lead_back(stored):
    stored.rig.submit("a", 17)
    stored.plan()
    stored.answer()
    stored.plan()
    stored.answer()
    stored.detach("a")
    assert stored.rig.rids(stored.round()) == ["a"]
    assert stored.scheduler.storage_stats().held_blocks == 0


def test_a_page_that_somebody_else_computed_meanwhile_ends_the_wait(stored):
    stored.rig.submit("a", 17)
    stored.plan()
    stored.rig.submit("b", 17, max_cached_prefix_tokens=0)
    stored.round()
    plan = stored.round()  # what b computed is findable
    assert kinds(plan) == [StorageCancel]
    assert state(stored, "a") is not State.PREFETCHING


# -- memory that a worker may still write ------------------------------------------------------


def test_memory_is_quarantined_until_its_worker_is_known_to_be_done(stored):
    stored.rig.submit("a", 17)
    stored.plan()
    stored.answer()
    stored.plan()
    (op_id,) = stored.open
    stored.answer(retired=False)
    assert stored.round().batch.input_lengths.tolist() == [17]
    stored.rig.finish("a")
    stored.tick(10**9)
    for at in range(20):  # whoever needs host memory does not get these blocks
        stored.run(f"r{at}", range(1000 * at, 1000 * at + 30))
    stats = stored.scheduler.storage_stats()
    assert (stats.quarantined, stats.held_blocks, stats.operations) == (1, 4, 1)
    assert stored.scheduler.clear(), "what is quarantined never becomes findable"
    assert stored.scheduler.storage_stats().held_blocks == 4
    stored.retire(op_id)
    assert stored.scheduler.storage_stats().held_blocks == 0
    assert stored.scheduler._host.pool.empty == 63


def test_bad_objects_are_not_asked_for_again_until_the_cache_is_cleared(stored):
    stored.rig.submit("a", 17)
    stored.plan()
    stored.answer()
    stored.plan()
    stored.answer(success=[True, True, False, True], failed=(False, False, True, False))
    stored.rig.abort("a")
    stored.round()
    assert stored.scheduler.storage_stats().bad_objects == 1
    stored.scheduler.clear_l1()
    stored.scheduler._host.disown()
    stored.rig.submit("b", 17)
    (query,) = stored.plan().storage_ops
    assert len(query.keys) == 3
    stored.rig.abort("b")
    stored.plan()
    stored.catch_up()
    assert stored.scheduler.clear()
    stored.rig.submit("c", 17)
    (query,) = stored.plan().storage_ops
    assert len(query.keys) == 4


def test_nothing_is_stored_that_a_load_under_way_may_have_spoilt():
    rig = StorageRig()
    rig.tick()
    rig.run("old", 17)
    assert rig.scheduler.clear_l1()
    rig.objects.clear()
    rig.scheduler._storage._known.clear()
    rig.rig.loads_fail = True
    rig.rig.submit("a", 25)
    rig.plan()  # asks for the two pages that host memory lacks
    rig.answer()
    plan = rig.round()
    assert [type(op) for op in plan.cache_ops] == [LoadBack]
    rig.round()
    rig.rig.acknowledge(1)  # pages computed from what was loaded reach host memory
    assert kinds(rig.plan()) == []
    assert rig.scheduler.storage_stats().backup_candidates == 2
    rig.rig.acknowledge(0)  # and the load turns out to have failed
    assert kinds(rig.plan()) == []
    assert rig.scheduler.storage_stats().backup_candidates == 0
    assert rig.objects == {}


# -- many ------------------------------------------------------------------------------------


def test_one_prefix_is_fetched_once_for_all_who_share_it(stored):
    for at in range(6):
        stored.rig.submit(f"r{at}", [*range(17), 100 + at, 101 + at])
    plan = stored.plan()
    assert kinds(plan) == [StorageQuery]
    assert "fetching its prefix for another" in stored.scheduler.explain("r3")
    stored.answer()
    assert kinds(stored.plan()) == [StorageGet]
    stored.answer()
    plan = stored.round()
    assert kinds(plan) == []
    assert plan.batch.prefix_lengths.tolist() == [16] * 6


def test_who_waits_for_anothers_fetch_waits_no_longer_than_one_may_take(stored):
    for at in range(2):
        stored.rig.submit(f"r{at}", [*range(17), 100 + at])
    stored.plan()
    stored.tick(1000)
    plan = stored.round()
    assert kinds(plan) == [StorageQuery, StorageCancel]
    stored.tick(1000)
    stored.round()
    assert stored.scheduler.sizes().waiting == 0


def test_with_sharing_off_each_asks_for_itself():
    rig = StorageRig(share_in_flight=False)
    rig.tick()
    for at in range(2):
        rig.rig.submit(f"r{at}", [*range(17), 100 + at])
    assert kinds(rig.plan()) == [StorageQuery] * 2


def test_operations_are_as_many_as_may_be_and_the_rest_goes_on_without():
    rig = StorageRig(limits(max_operations=2))
    rig.tick()
    for at in range(6):
        rig.rig.submit(f"r{at}", range(100 * at, 100 * at + 9))
    plan = rig.round()
    assert kinds(plan) == [StorageQuery] * 2
    assert rig.rig.rids(plan) == ["r2", "r3", "r4", "r5"]


def test_a_request_in_a_long_line_is_asked_for_once_an_operation_is_to_spare():
    rig = StorageRig(limits(max_operations=1), max_rows=1)
    rig.tick()
    rig.rig.submit("r0", [1, 2])
    rig.round()
    for at in range(1, 3):
        rig.rig.submit(f"r{at}", range(100 * at, 100 * at + 9))
    assert kinds(rig.round()) == [StorageQuery]
    rig.answer()
    assert kinds(rig.round()) == [StorageQuery]


def test_stores_are_one_a_plan_and_leave_half_of_what_there_is_to_others():
    rig = StorageRig(limits(max_operations=4, max_keys_per_operation=3))
    rig.tick(storage=False)
    rig.rig.submit("a", 41)
    rig.round()
    rig.round()
    rig.rig.acknowledge()
    rig.tick()
    plans = [rig.round() for _ in range(4)]
    assert [kinds(plan) for plan in plans] == [[StoragePut], [StoragePut], [], []]
    assert [len(op.keys) for plan in plans for op in plan.storage_ops] == [3, 3]
    rig.answer()
    assert kinds(rig.round()) == [StoragePut]


def test_one_operation_leaves_none_to_store_with():
    rig = StorageRig(limits(max_operations=1))
    rig.tick(storage=False)
    rig.rig.submit("a", 17)
    rig.round()
    rig.round()
    rig.rig.acknowledge()
    rig.tick()
    assert kinds(rig.round()) == []
    assert rig.scheduler.storage_stats().disabled_drops == 4


def test_an_explanation_says_what_of_storage_is_waited_for_and_until_when(stored):
    stored.tick(7)
    stored.rig.submit("a", 17)
    stored.plan()
    text = stored.scheduler.explain("a")
    assert "waits for storage, whether it has 4 blocks of its prompt" in text
    assert "(operation 3), until 1007 us; it is 7 us" in text
    stored.answer()
    assert "some blocks of its prompt, not asked for yet" in stored.scheduler.explain("a")
    stored.plan()
    assert "waits for storage, 4 blocks of its prompt (operation" in stored.scheduler.explain("a")


def test_the_caches_of_the_device_may_be_cleared_while_storage_works(stored):
    stored.rig.submit("a", 17)
    stored.plan()
    assert not stored.scheduler.can_clear()
    assert not stored.scheduler.clear()
    assert stored.scheduler.clear_l1()
    stored.answer()
    assert stored.scheduler.can_clear()
