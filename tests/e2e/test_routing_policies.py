"""Requests find their data-parallel rank: real ranks, their own load reports, real caches."""

import asyncio
import logging
import os
import random
import signal

import pytest
from tests.e2e.engines import running

from drumline.client.routing import LeastCache, PrefixAware, RoundRobin, ShortestQueue
from drumline.core.errors import RequestError
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams, normalized

log = logging.getLogger(__name__)

SOAK = "DRUMLINE_SOAK_ROUTING" in os.environ
SESSIONS = 16
TURNS = 5
CONTEXT = 384
"""Tokens that a session's prompts begin with. A rank's pool of 4096 holds ten such, not sixteen."""
GRANULARITY = 64
FRESH_S = 3.0


class Chosen:
    """A policy that can be exchanged while an engine runs."""

    def __init__(self):
        self.policy = RoundRobin()

    def choose(self, now):
        return self.policy.choose(now)


def asked(engine, rid, prompt, count, rank=None):
    """Send a request; return its stream."""
    return engine.client.submit(
        TokenizedGenerateReqInput(
            rid=rid,
            input_ids=list(prompt),
            sampling_params=normalized(
                SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
            ),
            stream=True,
            data_parallel_rank=rank,
        )
    )


async def drained(stream):
    """Read a stream to its end; return its last delta."""
    last = None
    async for delta in stream:
        last = delta
    return last


async def ranks_of(engine, name, count):
    """Return which ranks take `count` short requests, one after the other."""
    taken = []
    for n in range(count):
        stream = asked(engine, f"{name}{n}", [n + 1, 7, 9], 2)
        taken.append(stream.engine_index)
        await drained(stream)
    return taken


async def until(fact, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not fact():  # noqa: ASYNC110  reports come when they come
            await asyncio.sleep(0.02)


async def hit_share(engine, name, seed):
    """Return how much of what sessions had sent before was cached when they sent it again."""
    draw = random.Random(seed)
    contexts = [[draw.randrange(512) for _ in range(CONTEXT)] for _ in range(SESSIONS)]
    found = 0
    for turn in range(TURNS):
        order = draw.sample(range(SESSIONS), SESSIONS)
        for session in order:
            question = [draw.randrange(512) for _ in range(20)]
            stream = asked(engine, f"{name}{turn}.{session}", contexts[session] + question, 4)
            last = await drained(stream)
            found += last.cached_tokens if turn else 0
    return found / (CONTEXT * SESSIONS * (TURNS - 1))


async def long_ones(engine, name, rank, count):
    """Keep `count` requests running on a rank, reported by it; return their streams."""
    streams = [asked(engine, f"{name}{n}", [n + 3] * 100, 300, rank) for n in range(count)]
    await until(lambda: engine.client.loads and engine.client.loads[rank].num_running >= count)
    return streams


async def hang_up(engine, streams):
    for stream in streams:
        stream.abort()
    await until(lambda: all(load.num_running == 0 for load in engine.client.loads))


def test_requests_go_where_the_policy_and_the_ranks_reports_say(tiny_model):
    async def run():
        chosen = Chosen()
        async with running(tiny_model, data=2, policy=chosen, peer_timeout=0) as engine:
            await until(lambda: engine.client.loads)
            assert await ranks_of(engine, "turns", 4) == [0, 1, 0, 1]
            pinned = [asked(engine, f"pin{n}", [1, 2], 2, rank=1) for n in range(3)]
            assert [stream.engine_index for stream in pinned] == [1, 1, 1]
            await asyncio.gather(*map(drained, pinned))
            with pytest.raises(RequestError, match="from 0 to 1"):
                asked(engine, "pin", [1, 2], 2, rank=2)

            for policy in (ShortestQueue(), LeastCache()):
                chosen.policy = policy
                busy = await long_ones(engine, type(policy).__name__, 0, 2)
                assert await ranks_of(engine, "free", 4) == [1, 1, 1, 1]
                await hang_up(engine, busy)

            # A rank that stands still reports nothing; after three seconds nobody is believed.
            chosen.policy = ShortestQueue()
            busy = await long_ones(engine, "still", 0, 2)
            os.kill(engine.ranks.pids[1], signal.SIGSTOP)
            try:
                await until(lambda: not engine.client.loads, FRESH_S + 5)
                waiting = [asked(engine, f"stale{n}", [n + 1, 7], 2) for n in range(4)]
                assert sorted(stream.engine_index for stream in waiting) == [0, 0, 1, 1]
            finally:
                os.kill(engine.ranks.pids[1], signal.SIGCONT)
            await asyncio.gather(*map(drained, waiting))
            await until(lambda: engine.client.loads)
            assert await ranks_of(engine, "again", 2) == [1, 1]
            await hang_up(engine, busy)

    asyncio.run(run())


@pytest.mark.skipif(not SOAK, reason="long: 160 prompts on real ranks; make soak")
def test_sessions_that_stay_where_their_prefix_is_find_it_cached(tiny_model):
    """Taking turns, sixteen sessions find a part of what they had sent; by prefix, all of it."""

    async def run():
        shares = []
        for policy in (RoundRobin(), PrefixAware(GRANULARITY)):
            chosen = Chosen()
            chosen.policy = policy
            async with running(tiny_model, data=2, policy=chosen) as engine:
                await until(lambda engine=engine: engine.client.loads)
                shares.append(await hit_share(engine, "s", seed=3))
        in_turn, by_prefix = shares
        log.info("cached of what was sent before: %.3f in turn, %.3f by prefix", *shares)
        assert in_turn < 0.65
        assert by_prefix >= 0.9

    asyncio.run(run())
