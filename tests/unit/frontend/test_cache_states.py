"""What `/debug/kv` and the metrics tell of engines' caches, and what they do without an answer."""

import msgspec
from tests.fakes.http import run, served

from drumline.contract.census import (
    CacheCounters,
    CacheState,
    Census,
    PoolCensus,
    TierCounters,
)
from drumline.frontend.cache_states import CacheStates
from drumline.frontend.service import Timings

COUNTERS = CacheCounters(
    TierCounters(3, 3000, 2, 2000),
    TierCounters(1, 1000, 1, 1000),
    stores=2,
    loads=1,
    hit_tokens=32,
    cached_tokens=48,
    retractions=4,
    restores=3,
    failed=1,
    aborts=5,
)


def state(empty=5):
    pools = Census(PoolCensus(10, 3, 2, empty), PoolCensus(20, 0, 4, 16), PoolCensus(6, 6, 0, 0))
    return CacheState(pools, 1, 2, COUNTERS)


def telling(told, asked=None):
    """Return an engine's answers to calls: the state `told` to `cache_state`."""

    def on_call(method, *args):
        if asked is not None:
            asked.append(method)
        return True, msgspec.json.encode(told).decode()

    return on_call


@run
async def test_debug_kv_shows_every_pool_and_that_no_page_is_lost(embedded):
    asked = []
    async with served(embedded, on_call=telling(state(), asked)) as it:
        reply = await it.http.get("/debug/kv")
        assert reply.status_code == 200
        body = reply.json()
        assert body["conserved"] is True
        (rank,) = body["ranks"]
        assert rank["dp_rank"] == 0
        assert rank["pools"] == {
            "device": {"pages": 10, "active": 3, "cached": 2, "empty": 5, "lost": 0},
            "host": {"pages": 20, "active": 0, "cached": 4, "empty": 16, "lost": 0},
            "snapshot": {"pages": 6, "active": 6, "cached": 0, "empty": 0, "lost": 0},
        }
        assert (rank["suspended_requests"], rank["open_operations"]) == (1, 2)
        assert rank["counters"]["host"]["stored_bytes"] == 3000
        assert rank["counters"]["retractions"] == 4
        assert asked == ["cache_state"]
        assert (await it.http.post("/debug/kv")).status_code == 405


@run
async def test_a_page_that_nothing_accounts_for_shows_as_lost(embedded):
    async with served(embedded, on_call=telling(state(empty=4))) as it:
        body = (await it.http.get("/debug/kv")).json()
        assert body["conserved"] is False
        assert body["ranks"][0]["pools"]["device"]["lost"] == 1
        metrics = await it.metrics()
        labels = 'dp_rank="0",held_by="lost",model_name="tiny",pool="device"'
        assert metrics[f"drumline:cache_pages{{{labels}}}"] == 1


@run
async def test_metrics_show_what_each_tier_took_and_gave(embedded):
    async with served(embedded, on_call=telling(state())) as it:
        found = await it.metrics()
        rank = 'dp_rank="0",model_name="tiny"'
        for name, value in (
            ("tokenspeed:num_preemptions_total", 4),
            ("drumline:cache_restores_total", 3),
            ("drumline:cache_stores_total", 2),
            ("drumline:cache_loads_total", 1),
            ("drumline:cache_host_hit_tokens_total", 32),
            ("drumline:cache_hit_tokens_total", 48),
            ("drumline:cache_failed_operations_total", 1),
            ("drumline:capacity_aborts_total", 5),
            ("drumline:num_requests_suspended", 1),
            ("drumline:cache_open_operations", 2),
        ):
            assert found[f"{name}{{{rank}}}"] == value, name
        assert found[f'drumline:cache_stored_bytes_total{{{rank},tier="host"}}'] == 3000
        assert found[f'drumline:cache_loaded_blocks_total{{{rank},tier="snapshot"}}'] == 1
        pool = 'dp_rank="0",held_by="cached",model_name="tiny",pool="host"'
        assert found[f"drumline:cache_pages{{{pool}}}"] == 4


@run
async def test_an_engine_that_cannot_tell_costs_its_figures_and_nothing_else(embedded):
    refuse = {"on_call": lambda *call: (False, "this engine has no operation 'cache_state'")}
    async with served(embedded, **refuse) as it:
        reply = await it.http.get("/debug/kv")
        assert reply.status_code == 501
        assert "has no operation 'cache_state'" in reply.json()["error"]["message"]
        metrics = await it.metrics()
        assert not [name for name in metrics if name.startswith("drumline:cache_")]
        assert "drumline:http_requests_in_flight" in metrics


@run
async def test_an_engine_that_does_not_answer_is_waited_for_only_so_long(embedded):
    options = {"timings": Timings(ask_s=0.1), "on_call": lambda *call: None}
    async with served(embedded, **options) as it:
        reply = await it.http.get("/debug/kv")
        assert reply.status_code == 503
        error = reply.json()["error"]
        assert error["code"] == "engine_silent"
        assert "did not answer cache_state within 0.1 s" in error["message"]
        assert "drumline:http_requests_in_flight" in await it.metrics()


@run
async def test_an_engine_that_is_gone_is_said_to_be(embedded):
    async with served(embedded, on_call=telling(state())) as it:
        it.fake.close()
        await it.service.engine.closed.wait()
        reply = await it.http.get("/debug/kv")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "engine_dead"


@run
async def test_every_data_parallel_rank_is_asked_and_shown_under_its_number():
    class Engines:
        async def call(self, method, *args, timeout_s):
            assert method == "cache_state"
            return [
                msgspec.defstruct("Reply", ["message", "success"])(
                    msgspec.json.encode(state(empty)).decode(), True
                )
                for empty in (5, 3)
            ]

    states = CacheStates(Engines(), 1.0)
    await states.ask()
    view = states.view()
    assert not view.conserved
    assert [(rank.dp_rank, rank.pools["device"].lost) for rank in view.ranks] == [(0, 0), (1, 2)]
