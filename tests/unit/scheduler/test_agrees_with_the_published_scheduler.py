"""One random stream of events drives the published C++ scheduler and ours; plans agree."""

import os

import pytest

from drumline.contract.specs import AttentionKind, CacheGroup

pytest.importorskip(
    "tokenspeed_scheduler",
    reason="tokenspeed-scheduler is not installed (CPython 3.11 on x86-64 Linux only)",
)

from published_pair import Pair

EVENTS = int(os.environ.get("DRUMLINE_SOAK_EVENTS", "100"))


FULL = CacheGroup(group_id="full", block_tokens=4)
PACKED = CacheGroup(group_id="packed", block_tokens=4, blocks_per_parent=3)
WINDOW = CacheGroup(
    group_id="window", kind=AttentionKind.SLIDING_WINDOW, block_tokens=4, window_tokens=6
)
STATE = CacheGroup(group_id="state", kind=AttentionKind.STATE, block_tokens=0)
PACKED_STATE = CacheGroup(
    group_id="packed state", kind=AttentionKind.STATE, block_tokens=0, blocks_per_parent=3
)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {"num_pages": 200, "max_scheduled_tokens": 16},
        {"num_pages": 40, "max_rows": 5},
        {"num_pages": 400, "max_scheduled_tokens": 12, "overlap_depth": 1},
        {"num_pages": 100, "decode_tokens": 3},
        {
            "num_pages": 100,
            "prefix_granularity": 8,
            "groups": (CacheGroup(group_id="full", block_tokens=4),),
        },
        {"num_pages": 300, "groups": (FULL, WINDOW)},
        {"num_pages": 300, "groups": (FULL, WINDOW), "max_scheduled_tokens": 12},
        {"num_pages": 300, "groups": (FULL, PACKED)},
        {"num_pages": 60, "max_rows": 4, "groups": (FULL, PACKED)},
        {"num_pages": 300, "groups": (FULL, WINDOW, PACKED), "prefix_granularity": 8},
        {"num_pages": 300, "groups": (FULL, STATE)},
        {"num_pages": 300, "groups": (FULL, STATE), "max_scheduled_tokens": 12},
        {
            "num_pages": 300,
            "groups": (FULL, PACKED, WINDOW, PACKED_STATE, STATE),
            "prefix_granularity": 8,
        },
        {"num_pages": 400, "groups": (FULL, STATE), "overlap_depth": 1},
        {"num_pages": 300, "groups": (FULL, STATE), "decode_tokens": 3},
    ],
)
def test_plans_agree(shape, caching, mixed, seed):
    pair = Pair(seed, mixed_batch=mixed, prefix_caching=caching, **shape)
    for _ in range(EVENTS):
        try:
            pair.step()
        except AssertionError as error:
            error.add_note("\n".join(map(str, pair.story[-12:])))
            raise
    assert pair.restarts.total() <= max(EVENTS // 100, 2), f"too often: {pair.restarts}"
