"""The embedded model on a KV pool a third of what is asked of it, in both float types.

`make soak` plays it in full: 64 requests of 600 tokens that want 400 more
(`DRUMLINE_SOAK_MEMORY` says how many).
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import logging
import time

import pytest
from tests.e2e.whole_rank import (
    ROUNDS,
    WAVER,
    Rank,
    answers,
    check_fed_once,
    parted,
    prompts,
    same,
    told,
)

from drumline.contract.messages import AbortAsked
from drumline.contract.request import Sampling
from drumline.core.config import Dtype

_log = logging.getLogger(__name__)

FULL = int(os.environ.get("DRUMLINE_SOAK_MEMORY", "0"))
COUNT, PROMPT, ANSWER = (FULL, 600, 400) if FULL else (4, 20, 16)
INTERVALS = range(1, 8) if FULL else (1, 3)
VOCAB = 40_000
PAGE = 16


@pytest.mark.parametrize("dtype", WAVER)
def test_a_pool_a_third_the_size_serves_all_with_the_ample_pool_s_texts(dtype):
    asked = prompts(COUNT, vocab=VOCAB, length=PROMPT)
    context = PROMPT + ANSWER
    pages = COUNT * -(-context // PAGE)
    fields = {"context": context, "seqs": COUNT}
    began = time.perf_counter()
    ample = Rank(None, dtype, pages=pages + COUNT, **fields)
    expected = told(ample, asked)
    ample.close()
    between = time.perf_counter()
    short = Rank(None, dtype, pages=pages // 3, **fields)
    try:
        mine = told(short, asked)
        took = time.perf_counter() - between, between - began
        check_fed_once(short, asked, context)
        assert short.counters.retractions >= max(1, COUNT // 4)
        assert short.counters.restores == short.counters.retractions
        short.check_drained()
        state = short.loop._cache_ops.state(short.scheduler)
        assert (state.pools.device.lost, state.pools.snapshot.lost) == (0, 0)
    finally:
        short.close()
    assert {len(each.ids) for each in (*mine, *expected)} == {ANSWER}
    count = parted(mine, expected, WAVER[dtype])
    _log.info(
        "%s: %.0f s on a third of the pool, %.0f s on an ample one; %d suspended, %d of %d texts "
        "part at a tie",
        dtype,
        *took,
        short.counters.retractions,
        count,
        COUNT,
    )
    # In float32 a tie within rounding is next to never met.
    assert count == 0 or dtype is Dtype.BFLOAT16


@pytest.mark.parametrize("dtype", WAVER)
def test_forced_retraction_every_so_many_plans_changes_no_text_and_no_logprob(dtype):
    # One at a time: nothing is ever computed beside it, so bits are the same in either type.
    asked = prompts(1, vocab=VOCAB, length=20)
    fields = {"context": 32, "seqs": 1}
    ample = Rank(None, dtype, pages=6, **fields)
    expected = answers(ample, asked)
    ample.close()
    for interval in INTERVALS:
        short = Rank(None, dtype, pages=6, debug_force_retraction_interval=interval, **fields)
        try:
            same(answers(short, asked), expected, 1e-6)
            check_fed_once(short, asked, 32)
            assert short.counters.retractions >= 12 // (interval + 2)
            short.check_drained()
        finally:
            short.close()


PLACES = {
    "host pool full": {"kvstore": True, "kvstore_ratio": 0.2},
    "host pool alone": {"kvstore": True, "retraction_snapshot_host_gb": 0},
    "host pool absent": {},
    "one slot": {"retraction_snapshot_max_requests": 1},
    "zero slots": {"retraction_snapshot_max_requests": 0},
}


@pytest.mark.skipif(not FULL, reason="played by make soak; every run plays it on a tiny model")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", WAVER)
def test_whatever_place_there_is_ends_and_aborts_leave_every_pool_as_it_was(dtype, place):
    asked = prompts(6, vocab=VOCAB, length=40)
    fields = {"context": 80, "seqs": 6, "prefix_granularity": 16}
    ample = Rank(None, dtype, pages=60, **fields)
    expected = told(ample, asked)
    ample.close()
    short = Rank(None, dtype, pages=12, **fields, **PLACES[place])
    aborted = set()
    try:
        for n, prompt in enumerate(asked):
            short.ask(f"r{n}", prompt, Sampling(top_k=1), top=2)
        for _ in range(ROUNDS):
            short.run(1)
            images = short.scheduler._retraction._images.items()
            suspended = [rid for rid, image in images if image.wanted]
            if suspended and not aborted:
                aborted.add(suspended[0])
                short.frontend.push(AbortAsked((suspended[0],)))
            if short.loop.idle and not short.frontend.queued:
                break
        short.check_drained()
        pools = short.loop._cache_ops.state(short.scheduler).pools
        assert (pools.device.lost, pools.host.lost, pools.snapshot.lost) == (0, 0, 0)
    finally:
        short.close()
    ends = {f"r{n}": short.frontend.ended(f"r{n}") for n in range(len(asked))}
    for rid, end in ends.items():
        if end.finished == "length":
            assert len(end.ids) == 40
        elif rid not in aborted:
            assert end.details["message"].startswith(("out_of_pages", "image_does_not_fit"))
    assert any(end.finished == "length" for end in ends.values())
    slots = place not in {"zero slots", "host pool alone"}
    assert bool(aborted) is (short.counters.retractions > 0) is slots
    assert (short.counters.host.stored_blocks > 0) is ("kvstore" in PLACES[place])
    parted(ends.values(), expected, WAVER[dtype])


@pytest.mark.skipif(not FULL, reason="played by make soak; every run plays it on a tiny model")
@pytest.mark.parametrize("dtype", WAVER)
def test_a_second_turn_whose_pages_left_the_device_is_loaded_back(dtype):
    asked = prompts(5, vocab=VOCAB, length=100)
    rank = Rank(None, dtype, pages=14, context=128, seqs=1, kvstore=True, kvstore_ratio=8.0)
    try:
        for n, prompt in enumerate((*asked, asked[0])):
            rank.ask(f"r{n}", prompt, Sampling(top_k=1), 8, top=2)
            rank.run_until_idle()
            rank.run(3)
            rank.run_until_idle()
        assert rank.frontend.ended("r0").cached_tokens == 0
        second = rank.frontend.ended("r5")
        assert second.cached_tokens == rank.counters.hit_tokens >= 64
        assert rank.counters.loads == 1
        rank.check_drained()
    finally:
        rank.close()
    parted([second], [rank.frontend.ended("r0")], WAVER[dtype])
