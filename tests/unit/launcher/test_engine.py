"""An engine before it starts: what the operator's choices become."""

import asyncio
import json

import pytest
from tests.fakes.engine import registration

from drumline.client.routing import LeastCache, PrefixAware, RoundRobin, ShortestQueue
from drumline.core.config import Config, LoadBalance, ModelConfig, ParallelConfig
from drumline.core.model_files import find_model
from drumline.frontend.text.load import load_tokenizer
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


@pytest.mark.parametrize(("model_ids", "warns"), [(49151, True), (49152, False), (50000, False)])
def test_a_tokenizer_with_more_ids_than_the_model_is_told_of_with_both_numbers(
    tmp_path, caplog, monkeypatch, model_ids, warns
):
    load_tokenizer(find_model(None)).write(tmp_path)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": model_ids,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    async def registered(engine):
        return registration()

    monkeypatch.setattr(Engine, "registered", registered)

    async def started():
        engine = Engine(Config(model=ModelConfig(model=str(tmp_path))), quiet=True)
        (await engine.service()).close()
        await engine.client.close()

    asyncio.run(started())
    said = f"the tokenizer has 49152 ids, the model's vocabulary {model_ids}:"
    assert (said in caplog.text) is warns
