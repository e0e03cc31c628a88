"""Engines of several rank processes: the answers of one rank, and ends that are whole."""

import asyncio
import os
import random
import re
import signal
import time

import httpx
import pytest
import torch
import transformers
from tests.e2e.engines import gathered, running
from tests.e2e.processes import Server, gone_within

from drumline.core.errors import PeerError

LAYOUTS = [(2, 1), (1, 2), (2, 2)]
NEAR_TIE = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the directory of a small Llama of random weights; three heads share a KV head."""
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=144,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    made = transformers.AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.2 * noise)
    directory = tmp_path_factory.mktemp("model")
    made.save_pretrained(directory)
    return directory


def mixed_requests():
    """Return 50 requests: short and long, some with a common head, longer than a chunk too."""
    rng = random.Random(5)
    heads = [[rng.randrange(512) for _ in range(80)] for _ in range(3)]
    asked = []
    for _ in range(50):
        head = rng.choice(heads)[: rng.choice((0, 0, 30, 80))]
        tail = [rng.randrange(512) for _ in range(rng.randint(1, 90))]
        asked.append((head + tail, rng.randint(1, 24)))
    return asked


@pytest.fixture(scope="module")
def alone(model):
    """Return what one rank answers, with its margins."""

    async def ask():
        async with running(model) as engine:
            return await gathered(engine, mixed_requests(), top=2)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("tensor", "data", "suspend_every"), [*((*layout, 0) for layout in LAYOUTS), (2, 1, 9)]
)
def test_several_ranks_give_the_greedy_tokens_of_one(model, alone, tensor, data, suspend_every):
    async def ask():
        async with running(model, tensor, data, suspend_every=suspend_every) as engine:
            return await gathered(engine, mixed_requests())

    answers = asyncio.run(ask())
    cut = 0
    for (mine, _), (ids, margins) in zip(answers, alone, strict=True):
        tie = next((at for at, margin in enumerate(margins) if margin < NEAR_TIE), None)
        cut += tie is not None
        assert mine[:tie] == ids[:tie]
        assert len(mine) == len(ids)
    assert cut <= 0.02 * len(alone)


@pytest.mark.parametrize(("tensor", "data", "victim"), [(2, 1, 0), (2, 1, 1), (1, 2, 0), (1, 2, 1)])
def test_a_killed_rank_ends_the_others_and_is_named(model, tensor, data, victim):
    async def run():
        async with running(model, tensor, data) as engine:
            streams = [
                asyncio.ensure_future(engine.tokens(f"r{n}", [n, 2, 3], 400)) for n in range(4)
            ]
            await asyncio.sleep(random.uniform(0.05, 0.6))
            began = time.perf_counter()
            os.kill(engine.ranks.pids[victim], signal.SIGKILL)
            error = await asyncio.wait_for(engine.ranks.lost(), 5)
            assert str(error).startswith(f"rank {victim} was killed by SIGKILL while serving")
            assert await asyncio.to_thread(gone_within, engine.processes, 5)
            assert time.perf_counter() - began < 8
            for ended in await asyncio.gather(*streams, return_exceptions=True):
                assert isinstance(ended, PeerError | tuple)

    asyncio.run(run())


@pytest.mark.parametrize(("tensor", "data", "victim"), [(2, 1, 1), (1, 2, 0)])
def test_a_stopped_rank_is_given_up_within_its_bound(model, tensor, data, victim):
    async def run():
        async with running(model, tensor, data, peer_timeout=1.5) as engine:
            stream = asyncio.ensure_future(engine.tokens("r", [1, 2, 3], 400))
            await asyncio.sleep(0.3)
            began = time.perf_counter()
            os.kill(engine.ranks.pids[victim], signal.SIGSTOP)
            error = await asyncio.wait_for(engine.ranks.lost(), 10)
            assert time.perf_counter() - began < 8
            assert re.search(rf"rank {victim}\b", str(error))
            os.kill(engine.ranks.pids[victim], signal.SIGCONT)
            await asyncio.gather(stream, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize(("tensor", "data", "victim"), [(2, 1, 0), (1, 2, 1)])
def test_a_rank_that_is_stopped_and_continued_goes_on(model, tensor, data, victim, capfd):
    async def run():
        async with running(model, tensor, data, peer_timeout=0) as engine:
            expected, _ = await engine.tokens("before", [1, 2, 3], 150, rank=0)
            stream = asyncio.ensure_future(engine.tokens("during", [1, 2, 3], 150, rank=0))
            await asyncio.sleep(0.1)
            os.kill(engine.ranks.pids[victim], signal.SIGSTOP)
            await asyncio.sleep(3)
            assert not stream.done()
            os.kill(engine.ranks.pids[victim], signal.SIGCONT)
            ids, _ = await asyncio.wait_for(stream, 60)
            assert ids == expected

    asyncio.run(run())
    said = capfd.readouterr().err
    assert re.search(rf"rank {victim} has not been heard .*; it is waited for", said)
    assert f"rank {victim} is heard again" in said


def test_a_tree_whose_rank_is_killed_ends_with_1_and_leaves_nobody():
    server = Server("--max-total-tokens", "4096", "--tp", "2")
    try:
        server.wait_ready()
        ranks = server.ranks()
        titles = sorted(rank.cmdline()[0] for rank in ranks)
        assert titles == ["drumline::rank0_tp0", "drumline::rank1_tp1"]
        body = {"prompt": "One two three", "max_tokens": 4, "temperature": 0}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 4
        os.kill(next(r.pid for r in ranks if "tp1" in r.cmdline()[0]), signal.SIGKILL)
        assert server.wait(20) == 1
        assert "rank 1 was killed by SIGKILL while serving" in server.said
        assert gone_within(ranks, 2)
    finally:
        server.close()


def test_data_parallel_ranks_serve_and_end_together_with_0():
    server = Server("--max-total-tokens", "4096", "--data-parallel-size", "2")
    try:
        server.wait_ready()
        ranks = server.ranks()
        body = {"prompt": "One two three", "max_tokens": 4, "temperature": 0}
        for rank in (0, 1):
            reply = httpx.post(
                f"{server.url}/v1/completions",
                json=body | {"data_parallel_rank": rank},
                timeout=60,
            )
            assert reply.json()["usage"]["completion_tokens"] == 4
        reply = httpx.post(
            f"{server.url}/v1/completions", json=body | {"data_parallel_rank": 2}, timeout=60
        )
        assert reply.status_code == 400
        assert "data_parallel_rank" in reply.json()["error"]["message"]
        server.signal()
        assert server.wait() == 0, server.said
        assert gone_within(ranks, 2)
    finally:
        server.close()
