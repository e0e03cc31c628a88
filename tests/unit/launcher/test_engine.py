"""An engine before it starts: what the operator's choices become."""

import asyncio

import pytest

from drumline.client.routing import LeastCache, PrefixAware, RoundRobin, ShortestQueue
from drumline.core.config import Config, LoadBalance, ParallelConfig
from drumline.launcher.engine import Engine


@pytest.mark.parametrize(
    ("method", "policy"),
    [
        (LoadBalance.ROUND_ROBIN, RoundRobin),
        (LoadBalance.SHORTEST_QUEUE, ShortestQueue),
        (LoadBalance.MINIMUM_CACHE_USAGE, LeastCache),
        (LoadBalance.PREFIX_AWARE, PrefixAware),
    ],
)
def test_requests_are_spread_as_the_operator_chose(method, policy):
    config = Config(parallel=ParallelConfig(data_parallel_size=2, load_balance_method=method))

    async def chosen():
        engine = Engine(config, quiet=True)
        policy = engine.client._policy
        await engine.client.close()
        return policy

    assert type(asyncio.run(chosen())) is policy
