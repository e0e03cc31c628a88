"""Prefill and decode engines: bootstrap, hand-over, arrival, and ends of every kind."""

import pytest
from peer_rig import PeerRig

from drumline.contract.cache import LoadBack, Restore, Snapshot, WriteBack
from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.core.config import Role
from drumline.core.errors import ConfigError, InvariantError
from drumline.scheduler.events import (
    Aborted,
    Bootstrapped,
    Finished,
    IllegalTransitionError,
    RemoteFailed,
    RemotePrefilled,
    RemoteSucceeded,
    Tick,
)
from drumline.scheduler.lifecycle import State

FULL = CacheGroup(group_id="full", block_tokens=4)
WINDOW = CacheGroup(
    group_id="w", kind=AttentionKind.SLIDING_WINDOW, block_tokens=4, window_tokens=6
)
STATE = CacheGroup(group_id="state", kind=AttentionKind.STATE, block_tokens=0)


@pytest.fixture
def prefill():
    return PeerRig(Role.PREFILL)


@pytest.fixture
def decode():
    return PeerRig(Role.DECODE)


def state(rig, rid):
    return rig.scheduler._requests.get(rid).state


def rids(streams):
    return [stream.rid for stream in streams]


# -- both ---------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_request_waits_until_its_peers_have_found_each_other(role):
    rig = PeerRig(role)
    rig.submit("a", 10)
    plan = rig.round()
    assert (plan.batch, plan.remote_prefills) == (None, ())
    assert (rig.scheduler.sizes().bootstrapping, rig.scheduler.sizes().live) == (1, 1)
    assert "waits until its peers have found each other" in rig.scheduler.explain("a")
    rig.tell(Bootstrapped("a"), Bootstrapped("a"), Bootstrapped("nobody"))
    assert rig.scheduler.sizes().waiting == 1
    plan = rig.round()
    assert plan.batch or plan.remote_prefills


def test_whoever_was_submitted_first_goes_first_whoever_bootstrapped_first(prefill):
    for at, rid in enumerate("abc"):
        prefill.submit(rid, range(100 * at, 100 * at + 9))
    prefill.tell(Bootstrapped("c"), Bootstrapped("b"), Bootstrapped("a"))
    assert prefill.rig.rids(prefill.round()) == ["a", "b", "c"]


def test_requests_that_bootstrap_count_for_the_limits_of_the_queue():
    rig = PeerRig(Role.PREFILL, max_queued_requests=1, max_rows=1)
    for rid in "ab":
        assert rig.submit(rid, 10) is None
    assert "2 requests wait" in rig.submit("c", 10)


def test_a_plain_engine_has_no_peers():
    rig = PeerRig(Role.PLAIN)
    rig.submit("a", 10)
    for event in (Bootstrapped("a"), RemotePrefilled("a", 1), RemoteSucceeded("a")):
        with pytest.raises(IllegalTransitionError, match=r"rid='a'.*a plain engine has no peers"):
            rig.tell(event)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"role": Role.PREFILL, "num_snapshot_pages": 8, "max_retracted_requests": 2},
            "num_snapshot_pages.*suspends nobody",
        ),
    ],
)
def test_roles_refuse_what_they_have_no_use_for(changes, message):
    with pytest.raises(ConfigError, match=message):
        PeerRig(changes.pop("role"), **changes)


# -- prefill ------------------------------------------------------------------------------


def test_a_prompt_is_handed_over_with_its_first_token_once_its_result_is_there(prefill):
    prefill.start("a", 10, max_new_tokens=50)
    plan = prefill.plan()
    assert plan.batch.input_lengths.tolist() == [10]
    assert len(prefill.rig.pages("a")) == 3, "the answer's room is the peer's business"
    assert state(prefill, "a") is State.AWAITING_RESULT
    assert prefill.plan().remote_decodes == ()
    prefill.rig.commit()
    plan = prefill.plan()
    (sent,) = plan.remote_decodes
    assert plan.batch is None
    assert plan.needs_device
    assert (sent.rid, sent.prompt_tokens) == ("a", 10)
    assert sent.tables[0].tolist() == prefill.rig.pages("a")
    assert prefill.plan().remote_decodes == (), "once"
    assert prefill.scheduler.sizes().transferring == 1


def test_chunks_are_computed_before_anything_is_handed_over():
    rig = PeerRig(Role.PREFILL, max_scheduled_tokens=8)
    rig.start("a", 18)
    lengths = []
    for _ in range(3):
        plan = rig.plan()
        lengths.append(plan.batch.input_lengths.tolist())
        assert plan.remote_decodes == ()
        rig.rig.commit()
    assert lengths == [[8], [8], [2]]
    assert rids(rig.plan().remote_decodes) == ["a"]


def test_pages_stay_until_the_peer_has_them_and_are_cached_then(prefill):
    prefill.start("a", 10)
    prefill.round()
    prefill.round()
    assert prefill.scheduler.active_pages() == 3
    prefill.succeed("a")
    assert prefill.scheduler.active_pages() == 0
    prefill.round()
    assert not prefill.scheduler.knows("a")
    prefill.start("b", [*range(10), 90])
    assert prefill.round().batch.prefix_lengths.tolist() == [10], "its tail included"


def test_a_prompt_may_be_had_before_it_was_handed_over(prefill):
    prefill.start("a", 10)
    prefill.round()
    prefill.tell(RemoteSucceeded("a"))  # a layer at a time, it all went with the chunks
    assert prefill.plan().remote_decodes == ()
    assert not prefill.scheduler.knows("a")


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_prefill_engines_request_does_not_finish_by_itself(prefill, rounds):
    prefill.start("a", 10)
    prefill.plan()
    for _ in range(rounds - 1):
        while prefill.rig.in_flight:
            prefill.rig.commit()
        prefill.plan()
    with pytest.raises(IllegalTransitionError, match="FINISH"):
        prefill.tell(Finished("a"))
    assert prefill.scheduler.active_pages() == 3


def test_success_before_the_result_is_illegal(prefill):
    prefill.start("a", 10)
    with pytest.raises(IllegalTransitionError, match="SUCCEED is illegal in state SUBMITTED"):
        prefill.tell(RemoteSucceeded("a"))
    prefill.plan()
    with pytest.raises(IllegalTransitionError, match="SUCCEED is illegal in state AWAITING_RES"):
        prefill.tell(RemoteSucceeded("a"))
    prefill.tell(RemoteSucceeded("nobody"))


def test_a_prefix_that_is_computed_twice_stays_where_it_is_read():
    rig = PeerRig(Role.PREFILL, share_in_flight=False)
    rig.start("a", 9)
    rig.start("b", 9)
    rig.round()
    plan = rig.round()
    assert rids(plan.remote_decodes) == ["a", "b"]
    assert not set(rig.rig.pages("a")) & set(rig.rig.pages("b"))
    assert plan.patches == ()


def test_a_prefix_in_flight_is_computed_once_for_many(prefill):
    for at in range(4):
        prefill.start(f"r{at}", [*range(16), 100 + at])
    tokens = sum(plan.batch.tokens for plan in (prefill.round() for _ in range(3)) if plan.batch)
    assert tokens == 17 + 3


def test_a_prefill_engine_writes_prompts_through_to_host_memory():
    rig = PeerRig(Role.PREFILL, num_host_pages=16)
    rig.start("a", 10)
    rig.round()
    (op,) = rig.round().cache_ops
    assert isinstance(op, WriteBack)
    assert len(op.moves[0].sources) == 2


# -- decode -------------------------------------------------------------------------------


def test_a_prompt_gets_all_its_blocks_at_once_and_costs_the_forward_nothing():
    rig = PeerRig(Role.DECODE, max_scheduled_tokens=4)
    for at, rid in enumerate("ab"):
        rig.start(rid, range(100 * at, 100 * at + 10), max_new_tokens=5)
    plan = rig.plan()
    assert rids(plan.remote_prefills) == ["a", "b"]
    one = plan.remote_prefills[0]
    assert (one.cached_tokens, one.prompt_tokens) == (0, 10)
    assert one.tables[0].tolist() == rig.rig.pages("a")
    assert len(one.tables[0]) == 4
    assert plan.batch is None
    assert plan.zeroes[0].blocks.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rig.scheduler.sizes().transferring == 2
    assert rig.plan().remote_prefills == ()


def test_the_first_decode_feeds_the_token_that_came_with_the_prompt(decode):
    decode.start("a", 10)
    decode.plan()
    decode.arrive("a")
    assert decode.scheduler.token_size("a") == 11
    plan = decode.round()
    assert plan.batch.decode_ids.tolist() == [10 * 7 % 50]
    assert plan.batch.prefix_lengths.tolist() == [10]
    assert plan.copies == ()
    plan = decode.round()
    assert plan.batch.decode_ids is None
    assert plan.batch.prefix_lengths.tolist() == [11]


def test_a_prompt_arrives_where_nothing_is_cached():
    rig = PeerRig(Role.DECODE, prefix_caching=False)
    for _ in range(2):
        rig.start("a", 24)
        assert rig.plan().remote_prefills[0].cached_tokens == 0
        rig.arrive("a")
        rig.round()
        rig.round()
        assert rig.scheduler.token_size("a") == 27
        rig.tell(Finished("a"))
        rig.plan()


def test_a_token_that_came_along_is_fed_once_beside_rows_that_sampled_theirs(decode):
    for at, rid in enumerate("ab"):
        decode.start(rid, range(100 * at, 100 * at + 10))
    decode.plan()
    decode.arrive("a")
    decode.round()
    decode.arrive("b")
    plan = decode.round()
    assert decode.rig.rids(plan) == ["a", "b"]
    assert plan.batch.decode_ids.tolist() == [-1, 10 * 7 % 50]


def test_a_window_group_gets_the_blocks_that_the_first_decode_looks_back_on():
    rig = PeerRig(Role.DECODE, groups=(FULL, WINDOW), num_pages=64)
    rig.start("a", 18)
    full, window = rig.plan().remote_prefills[0].tables
    assert len(full) == 5
    assert [block > 0 for block in window.tolist()] == [False, False, False, True, True]
    rig.arrive("a")
    for _ in range(12):
        rig.round()


def test_a_state_group_gets_a_block_for_what_the_prompt_carries_on():
    rig = PeerRig(Role.DECODE, groups=(FULL, STATE))
    rig.start("a", 18)
    (carried,) = rig.plan().remote_prefills[0].tables[1].tolist()
    assert carried > 0
    rig.arrive("a")
    for _ in range(12):
        rig.round()


def test_full_pages_that_the_device_has_are_not_sent(decode):
    decode.start("a", 14)
    decode.plan()
    decode.arrive("a")
    decode.round()
    decode.start("b", [*range(14), 90, 91])
    (stream,) = decode.round().remote_prefills
    assert stream.cached_tokens == 12
    assert stream.tables[0].tolist()[:3] == decode.rig.pages("a")[:3]
    decode.arrive("b")
    decode.round()


def test_twins_do_not_wait_for_each_other_and_share_what_both_were_sent(decode):
    for rid in "ab":
        decode.start(rid, 9)
    assert rids(decode.plan().remote_prefills) == ["a", "b"]
    for rid in "ba":
        decode.arrive(rid)
    decode.round()
    assert decode.rig.pages("a")[:2] == decode.rig.pages("b")[:2]


def test_host_memory_is_not_looked_at_for_prefixes():
    rig = PeerRig(
        Role.DECODE, num_host_pages=32, num_snapshot_pages=16, max_retracted_requests=2,
        debug_force_retraction_interval=5,
    )  # fmt: skip
    rig.start("a", 9)
    rig.plan()
    rig.arrive("a")
    kinds = set()
    for _ in range(12):
        plan = rig.round()
        kinds |= {type(op) for op in plan.cache_ops}
        while rig.rig.unacknowledged:
            rig.rig.acknowledge()
    assert {Snapshot, Restore, WriteBack} <= kinds
    assert len(rig.scheduler._host.index)
    rig.rig.finish("a")
    rig.round()
    while rig.rig.unacknowledged:
        rig.rig.acknowledge()
    assert rig.scheduler.clear_l1()
    rig.start("b", 9)
    plan = rig.plan()
    assert plan.remote_prefills[0].cached_tokens == 0
    assert not any(isinstance(op, LoadBack) for op in plan.cache_ops)


def test_a_request_suspended_before_its_first_decode_feeds_its_token_after_it():
    rig = PeerRig(Role.DECODE, num_pages=9, num_snapshot_pages=16, max_retracted_requests=2)
    rig.start("a", 12)
    rig.plan()
    rig.arrive("a")
    rig.start("b", range(50, 62))
    rig.round()
    fed = 0
    while rig.scheduler.sizes().live:
        if "b" in rig.coming:
            rig.arrive("b")
        plan = rig.round()
        if plan.batch is not None and plan.batch.decode_ids is not None:
            fed += int((plan.batch.decode_ids >= 0).sum())
        while rig.rig.unacknowledged:
            rig.rig.acknowledge()
        for rid in "ab":
            if rig.scheduler.token_size(rid) >= 24:
                rig.rig.finish(rid)
    assert fed == 1  # b's; a's was fed in the first round


def test_a_prompt_without_a_first_token_is_an_error(decode):
    decode.start("a", 9)
    decode.plan()
    with pytest.raises(InvariantError, match="request a: its prompt arrived without a first"):
        decode.tell(RemotePrefilled("a", -1))
    assert state(decode, "a") is State.RECEIVING


def test_a_prompt_cannot_arrive_before_it_has_blocks(decode):
    decode.submit("a", 9)
    with pytest.raises(IllegalTransitionError, match="arrived in state BOOTSTRAPPING"):
        decode.tell(RemotePrefilled("a", 1))
    decode.tell(Bootstrapped("a"))
    with pytest.raises(IllegalTransitionError, match="arrived in state SUBMITTED"):
        decode.tell(RemotePrefilled("a", 1))


def test_a_late_or_repeated_arrival_changes_nothing(decode):
    decode.start("a", 9)
    decode.plan()
    decode.arrive("a")
    decode.tell(RemotePrefilled("a", 3), RemotePrefilled("nobody", 3))
    assert decode.scheduler.token_size("a") == 10
    decode.round()
    decode.tell(RemotePrefilled("a", 3))
    assert decode.scheduler.token_size("a") == 11


def test_a_request_may_end_with_the_token_that_came_with_its_prompt(decode):
    decode.start("a", 8)
    decode.plan()
    decode.arrive("a")
    decode.tell(Finished("a"))
    assert decode.scheduler.active_pages() == 0
    decode.start("b", 9)
    assert decode.plan().remote_prefills[0].cached_tokens == 8


def test_a_request_that_is_still_sent_does_not_finish(decode):
    decode.start("a", 9)
    decode.plan()
    with pytest.raises(IllegalTransitionError, match="FINISH is illegal in state RECEIVING"):
        decode.tell(Finished("a"))


def test_what_finds_no_room_waits_and_smaller_ones_go_before_it():
    rig = PeerRig(Role.DECODE, num_pages=8)
    rig.start("a", 14)
    rig.start("big", range(100, 118))
    rig.start("c", range(200, 206))
    assert rids(rig.plan().remote_prefills) == ["a", "c"]
    assert "found no room" in rig.scheduler.explain("big")
    rig.fail("a")
    assert rids(rig.plan().remote_prefills) == ["big"]


# -- ends ---------------------------------------------------------------------------------


def _up_to(rig, role, steps):
    """Bring request `a` as far as `steps` say; returns whether a peer may touch its blocks."""
    rig.submit("a", 10)
    if steps > 0:
        rig.tell(Bootstrapped("a"))
    if steps > 1:
        rig.plan()
    if steps > 2 and role is Role.PREFILL:
        rig.rig.commit()
    if steps > 2 and role is Role.DECODE:
        rig.arrive("a")
    if steps > 3:
        rig.plan()
    return steps > 1 if role is Role.PREFILL else steps == 2


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_abort_leaves_the_blocks_until_no_peer_touches_them(role, steps):
    rig = PeerRig(role)
    touched = _up_to(rig, role, steps)
    rig.rig.abort("a")
    assert rig.scheduler.active_pages() == (3 if touched else 0)
    rig.tell(Aborted("a"), Finished("a"))
    plan = rig.plan()
    assert plan.batch is None
    assert plan.remote_decodes == ()
    assert rig.scheduler.knows("a") is touched
    assert rig.scheduler.sizes().transferring == touched
    while rig.rig.in_flight:
        rig.rig.commit()
    if touched and role is Role.DECODE and steps % 2:
        rig.tell(RemotePrefilled("a", 5))
    else:
        rig.fail("a")
    assert rig.scheduler.active_pages() == 0
    rig.plan()
    assert not rig.scheduler.knows("a")


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_transfer_that_ends_well_after_an_abort_frees_the_blocks_too(role):
    rig = PeerRig(role)
    _up_to(rig, role, 2)
    rig.rig.abort("a")
    rig.coming.clear()
    rig.tell(RemoteSucceeded("a") if role is Role.PREFILL else RemotePrefilled("a", 5))
    assert rig.scheduler.active_pages() == 0
    while rig.rig.in_flight:
        rig.rig.commit()


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_failed_transfer_ends_the_request_in_any_state(role, steps):
    rig = PeerRig(role)
    _up_to(rig, role, steps)
    rig.fail("a")
    assert rig.scheduler.active_pages() == 0
    rig.tell(RemoteFailed("a"), RemoteFailed("nobody"))
    rig.plan()
    assert not rig.scheduler.knows("a")


def test_an_unfinished_prompt_that_is_aborted_lets_others_go_on():
    rig = PeerRig(Role.PREFILL, max_scheduled_tokens=8)
    rig.start("a", 18)
    rig.start("b", range(100, 106))
    rig.plan()
    rig.rig.abort("a")
    assert rig.rig.rids(rig.plan()) == ["b"]
    assert rig.scheduler.active_pages() == 4
    rig.fail("a")
    assert rig.scheduler.active_pages() == 2


def test_a_frozen_round_starts_no_transfer():
    rig = PeerRig(Role.PREFILL)
    rig.start("a", 10)
    rig.round()
    rig.scheduler.advance_head([Tick(allow_forward=False)])
    assert rig.plan().remote_decodes == ()
    rig.scheduler.advance_head([Tick()])
    assert rids(rig.plan().remote_decodes) == ["a"]
