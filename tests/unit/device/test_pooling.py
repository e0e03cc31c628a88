"""Vectors of prompts are made of what `transformers` has behind its final norm."""

import threading

import numpy as np
import pytest
import torch
from tests.fakes.meshes import meshes, together

from drumline.contract.request import Pooling

from .small_rank import GREEDY, SmallDevice, SmallRank, half_of

PROMPT = np.random.default_rng(32).integers(0, 320, 37).tolist()


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return the vectors of PROMPT, by pooling."""
    with torch.inference_mode():
        model = checkpoint("llama")[0]
        hidden = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-1][0]
    return {Pooling.MEAN: hidden.mean(0).numpy(), Pooling.LAST: hidden[-1].numpy()}


def vector_of(rank, rid):
    return np.frombuffer(rank.answer(rid).details["embedding"], "<f4")


@pytest.fixture(scope="module")
def device(checkpoint):
    made = SmallDevice(checkpoint("llama")[1])
    yield made
    made.close()


@pytest.mark.parametrize("chunk", [1, 5, 16, 37, 64])
@pytest.mark.parametrize("pooling", Pooling)
def test_a_vector_is_the_same_in_any_chunks_and_whatever_is_cached(
    device, expected, pooling, chunk
):
    rank = SmallRank(device, chunk=chunk)
    rank.submit("beside", PROMPT[:20], GREEDY, max_new_tokens=9)
    for rid in ("new", "known"):
        rank.submit(rid, PROMPT, max_new_tokens=1, pooling=pooling)
        rank.finish()
        assert vector_of(rank, rid) == pytest.approx(expected[pooling], abs=2e-5)
    cached = rank.answer("known").cached_tokens
    assert (cached > 0) is (pooling is Pooling.LAST)
    assert not (rank.answer("beside").details or {}).get("embedding")


def test_vectors_outlast_suspensions(checkpoint, expected):
    device = SmallDevice(checkpoint("llama")[1], pages=24)
    rank = SmallRank(device, chunk=9, retract=3, caching=False)
    for i in range(4):
        rank.submit(f"r{i}", PROMPT, max_new_tokens=12, pooling=list(Pooling)[i % 2])
    rank.finish()
    for i in range(4):
        assert vector_of(rank, f"r{i}") == pytest.approx(expected[list(Pooling)[i % 2]], abs=2e-5)
    device.close()


@pytest.mark.parametrize("stages", [1, 2])
def test_two_ranks_make_the_vector_of_one(checkpoint, expected, stages):
    directory = checkpoint("llama")[1]
    store = torch.distributed.HashStore()
    stop = threading.Event()
    told = {}

    def serve(end):
        device = half_of(directory, store, end.index, stages)
        pipeline = end.group([0, 1], "pipeline") if stages > 1 else None
        rank = SmallRank(
            device,
            depth=stages,
            chunk=5,
            replica=end.group([0, 1]),
            leads=end.index == 0,
            pipeline=pipeline,
        )
        if end.index == 0:
            for pooling in Pooling:
                rank.submit(pooling.value, PROMPT, max_new_tokens=1, pooling=pooling)
            while rank.frontend.live or rank.frontend.queued:
                rank.run()
            told.update({pooling: vector_of(rank, pooling.value) for pooling in Pooling})
            stop.set()
        while not rank.loop.round(stop.is_set()):
            pass
        device.close()

    with meshes(2) as ends:
        assert together(ends, serve) == [None, None]
    for pooling in Pooling:
        assert told[pooling] == pytest.approx(expected[pooling], abs=2e-5)
