"""Which engine takes a request: turns, queues, pages, prefixes, and what old reports say."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.http import run, until
from tests.unit.client.test_engine_client import collected, linked, request

from drumline.client.reports import FRESH_US, Reports
from drumline.client.routing import (
    LeastCache,
    PrefixAware,
    RoundRobin,
    ShortestQueue,
    Situation,
    policy_of,
    roomed,
)
from drumline.contract.outputs import Load
from drumline.core.config import LoadBalance
from drumline.replay.clock import ManualClock

POLICIES = [RoundRobin, ShortestQueue, LeastCache, lambda: PrefixAware(4)]


def situation(*queues, pages=(), own=(), unreported=(), fresh=True, prompt=()):
    size = len(queues)
    loads = [
        Load(num_running=queue, num_waiting=0, kv_active_pages=held, kv_total_pages=100)
        for queue, held in zip(queues, pages or [0] * size, strict=True)
    ]
    return Situation(
        in_flight=own or [0] * size,
        unreported=unreported or [0] * size,
        loads=loads if fresh else (),
        prompt=prompt,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_are_taken_in_turn(policy):
    policy = policy()
    assert [policy.choose(situation(0, 0, 0)) for _ in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_old_reports_leave_turns(policy):
    policy = policy()
    chosen = [policy.choose(situation(9, 0, 5, pages=(9, 0, 5), fresh=False)) for _ in range(3)]
    assert chosen == [0, 1, 2]


@given(queues=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_the_shortest_queue_is_chosen(queues):
    assert queues[ShortestQueue().choose(situation(*queues))] == min(queues)


def test_requests_that_no_report_can_have_counted_count():
    policy = ShortestQueue()
    assert policy.choose(situation(2, 3, unreported=(4, 0))) == 1
    assert policy.choose(situation(0, 1, own=(5, 1))) == 1


def test_the_fewest_pages_win_and_the_shorter_queue_among_equals():
    assert LeastCache().choose(situation(0, 9, 9, pages=(50, 10, 20))) == 1
    assert LeastCache().choose(situation(5, 3, 4, pages=(10, 10, 10))) == 1


def test_a_prompt_goes_where_most_of_it_went_before():
    policy = PrefixAware(4)
    long, other = list(range(12)), list(range(50, 62))
    assert policy.choose(situation(1, 0, prompt=long)) == 1
    assert policy.choose(situation(0, 1, prompt=other)) == 0
    assert policy.choose(situation(0, 3, prompt=[*long, 99])) == 1
    assert policy.choose(situation(3, 0, prompt=other[:8])) == 0
    assert policy.choose(situation(3, 0, prompt=[1, 2])) == 1, "shorter than a page"


def test_a_prefix_is_not_worth_a_much_longer_queue():
    policy = PrefixAware(4)
    prompt = list(range(8))
    assert policy.choose(situation(0, 1, prompt=prompt)) == 0
    assert policy.choose(situation(30, 1, prompt=prompt)) == 1
    assert policy.choose(situation(0, 1, prompt=prompt)) == 1, "it lies there as well now"


def test_what_is_remembered_is_bounded():
    policy = PrefixAware(1)
    for start in range(0, 1 << 17, 1 << 14):
        policy.choose(situation(0, 0, prompt=list(range(start, start + (1 << 14)))))
    assert len(policy._places) == 1 << 16


def test_every_method_has_a_policy():
    assert {type(policy_of(method, 16)) for method in LoadBalance} == {
        RoundRobin,
        ShortestQueue,
        LeastCache,
        PrefixAware,
    }


def test_a_room_decides_alone():
    assert [roomed(room, 3) for room in (None, 0, 4, 5)] == [None, 0, 1, 2]
    assert roomed(7, 1) is None


def test_reports_say_nothing_once_one_is_three_seconds_old():
    clock = ManualClock()
    reports = Reports(2, clock)
    load = situation(1).loads[0]
    reports.heard(0, load, False)
    assert reports.loads == ()
    clock.advance(FRESH_US - 1)
    reports.heard(1, load, False)
    assert reports.loads == (load, load)
    clock.advance(1)
    assert reports.loads == ()


@run
async def test_a_room_outweighs_a_pin_over_the_wire():
    async with linked(engines=2) as (client, *_):
        asked = request("r", bootstrap_room=4, data_parallel_rank=1)
        assert client.submit(asked).engine_index == 0
        await asyncio.sleep(0)


@run
async def test_requests_are_spread_over_engines():
    async with linked(engines=2) as (client, *engines):
        streams = [client.submit(request(f"r{n}", ids=[n])) for n in range(6)]
        for stream in streams:
            await collected(stream)
        assert [len(engine.requests) for engine in engines] == [3, 3]


# --- over the wire, with engines that others use too


async def reporting(client, engines, *others):
    """Let engines report what others ask of them, and wait until all of it was heard."""
    for engine, load in zip(engines, others, strict=True):
        engine.held.set()
        engine.others = load
    await until(
        lambda: (
            [(one.num_running, one.num_waiting, one.kv_active_pages) for one in client.loads]
            == list(others)
        )
    )


def chosen(client, *prompts):
    """Return the engines that take requests with these prompts, sent at once."""
    return [
        client.submit(request(f"{n} of {len(prompts)}, {prompt}", ids=prompt)).engine_index
        for n, prompt in enumerate(prompts)
    ]


THREE = {"engines": 3, "report_s": 0.02}


@run
async def test_engines_that_others_use_are_taken_in_turn_all_the_same():
    async with linked(**THREE, policy=RoundRobin()) as (client, *engines):
        await reporting(client, engines, (9, 0, 90), (0, 0, 0), (4, 4, 50))
        assert chosen(client, [1], [2], [3], [4]) == [0, 1, 2, 0]


@run
async def test_the_shortest_queue_counts_what_others_sent_and_what_was_just_sent():
    async with linked(**THREE, policy=ShortestQueue()) as (client, *engines):
        await reporting(client, engines, (6, 0, 0), (0, 0, 0), (1, 1, 0))
        to = chosen(client, *([n] for n in range(6)))
        assert to[:2] == [1, 1]
        assert sorted(to[2:]) == [1, 1, 2, 2], "then both have two, and take turns"


@run
async def test_the_least_cache_in_use_wins_over_a_shorter_queue():
    async with linked(**THREE, policy=LeastCache()) as (client, *engines):
        await reporting(client, engines, (0, 0, 80), (7, 0, 10), (0, 0, 60))
        assert chosen(client, [1], [2]) == [1, 1]


@run
async def test_a_prompt_follows_its_prefix_over_the_wire():
    async with linked(**THREE, policy=PrefixAware(4)) as (client, *engines):
        await reporting(client, engines, (0, 0, 0), (1, 0, 0), (2, 0, 0))
        one, other = list(range(8)), list(range(20, 28))
        assert chosen(client, one, one, [*one, 1]) == [0, 0, 0]
        assert chosen(client, other) == [1]
        assert chosen(client, one) == [0], "though it has the longest queue by now"


@run
@pytest.mark.parametrize("policy", [ShortestQueue, LeastCache, lambda: PrefixAware(4)])
async def test_engines_are_taken_in_turn_when_one_has_not_reported_for_three_seconds(policy):
    clock = ManualClock()
    async with linked(**THREE, policy=policy(), clock=clock) as (client, *engines):
        await reporting(client, engines, (5, 0, 50), (0, 0, 0), (5, 0, 50))
        assert chosen(client, [1], [2]) == [1, 1]
        engines[2].mute.set()
        # What it was sending when it fell silent is heard before time goes on.
        await asyncio.sleep(0.2)
        clock.advance(FRESH_US)
        await asyncio.sleep(0.1)
        assert client.loads == (), "two fresh reports of three are none"
        assert sorted(chosen(client, [3], [4], [5])) == [0, 1, 2]
        engines[2].mute.clear()
        await until(lambda: client.loads)
        assert chosen(client, [6]) == [1]
