"""Log probabilities are those of `transformers`, however a prompt is cut and whatever is cached."""

import threading

import numpy as np
import pytest
import torch
from tests.fakes.meshes import meshes, together

from drumline.contract.request import Sampling

from .small_rank import GREEDY, SmallDevice, SmallRank, half_of

PROMPT = np.random.default_rng(31).integers(0, 320, 37).tolist()
NAMED = (5, 300, 5)
CLOSE = 2e-4


@pytest.fixture(scope="module")
def device(checkpoint):
    made = SmallDevice(checkpoint("llama")[1])
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return a function: ids to the log probabilities behind each of them."""
    model = checkpoint("llama")[0]

    def of(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()

    return of


def assert_prompt_told(told, ids, table, start, top):
    """Whether a prompt's columns are aligned: an entry for each token from `start` on."""
    assert told.ids == ids[start:]
    assert told.logprobs[0] is None
    assert len(told.logprobs) == len(ids) - start
    own = table[np.arange(start, len(ids) - 1), ids[start + 1 :]]
    assert told.logprobs[1:] == pytest.approx(own.tolist(), abs=CLOSE)
    if top is None:
        assert told.top_logprobs is None
        return
    assert told.top_logprobs[0] is None
    assert told.top_ids[0] is None
    for place, (values, named) in enumerate(
        zip(told.top_logprobs[1:], told.top_ids[1:], strict=True), start
    ):
        row = table[place]
        assert named[top:] == list(NAMED)
        best = np.sort(row)[::-1][:top]
        assert values[:top] == pytest.approx(best.tolist(), abs=CLOSE)
        assert values == pytest.approx(row[named].tolist(), abs=CLOSE)


def assert_answer_told(told, prompt, expected, top):
    table = expected([*prompt, *told.ids])[len(prompt) - 1 :]
    own = [table[place][token] for place, token in enumerate(told.ids)]
    assert told.logprobs == pytest.approx(own, abs=CLOSE)
    for place, (values, named) in enumerate(zip(told.top_logprobs, told.top_ids, strict=True)):
        assert named[top:] == list(NAMED)
        assert values == pytest.approx(table[place][named].tolist(), abs=CLOSE)


@pytest.mark.parametrize("depth", [0, 1])
def test_prompt_and_answer_are_told_at_every_chunk_size(device, expected, depth):
    table = expected(PROMPT)
    for chunk in range(1, len(PROMPT) + 1):
        rank = SmallRank(device, depth=depth, chunk=chunk, caching=False)
        start = chunk % 3 * 5
        wants = {
            "return_logprob": True,
            "top_logprobs": 3,
            "logprob_ids": NAMED,
            "prompt_logprobs_from": start,
            "max_new_tokens": 4,
        }
        rank.submit("a", PROMPT, Sampling(seed=chunk), stream=bool(chunk % 2), **wants)
        rank.submit("b", PROMPT[:20], GREEDY, max_new_tokens=6)
        rank.finish()
        told = rank.answer("a")
        assert_prompt_told(told.prompt, PROMPT, table, start, 3)
        assert_answer_told(told, PROMPT, expected, 3)
        assert rank.answer("b").prompt is None


def test_what_is_told_of_was_computed_and_the_rest_may_be_cached(device, expected):
    rank = SmallRank(device, chunk=7)
    rank.submit("first", PROMPT, GREEDY)
    rank.finish()
    for start, cached in ((0, 0), (15, 0), (16, 16), (20, 16), (33, 32), (36, 36), (-1, 36)):
        wants = {"return_logprob": True, "prompt_logprobs_from": start, "max_new_tokens": 3}
        rank.submit(f"from{start}", PROMPT, GREEDY, **wants)
        rank.finish()
        told = rank.answer(f"from{start}")
        assert told.cached_tokens <= cached
        assert told.cached_tokens >= cached // 16 * 16
        assert told.ids == rank.answer("first").ids[:3]
        if start < 0:
            assert told.prompt is None
        else:
            assert_prompt_told(told.prompt, PROMPT, expected(PROMPT), start, None)


def test_prompts_are_told_across_suspensions(checkpoint, expected):
    device = SmallDevice(checkpoint("llama")[1], pages=24)
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(4)]
    rank = SmallRank(device, chunk=9, retract=4, caching=False)
    for i, prompt in enumerate(prompts):
        wants = {"return_logprob": True, "prompt_logprobs_from": i, "max_new_tokens": 12}
        rank.submit(f"r{i}", prompt, Sampling(seed=i), logprob_ids=NAMED, **wants)
    rank.finish()
    for i, prompt in enumerate(prompts):
        told = rank.answer(f"r{i}")
        assert len(told.ids) == 12
        assert_prompt_told(told.prompt, prompt, expected(prompt), i, 0)
        assert_answer_told(told, prompt, expected, 0)
    device.close()


@pytest.mark.parametrize(("stages", "depth"), [(1, 0), (1, 1), (2, 0), (2, 2)])
def test_two_ranks_tell_what_one_does_at_every_chunk_size(checkpoint, expected, stages, depth):
    directory = checkpoint("llama")[1]
    store = torch.distributed.HashStore()
    table = expected(PROMPT)
    chunks = range(1, len(PROMPT) + 1)
    stops = {chunk: threading.Event() for chunk in chunks}
    told = {}

    def serve(end):
        device = half_of(directory, store, end.index, stages)
        replica = end.group([0, 1])
        pipeline = end.group([0, 1], "pipeline") if stages > 1 else None
        for chunk in chunks:
            rank = SmallRank(
                device, depth=depth, chunk=chunk, caching=False, replica=replica,
                leads=end.index == 0, pipeline=pipeline,
            )  # fmt: skip
            if end.index == 0:
                wants = {"return_logprob": True, "prompt_logprobs_from": chunk % 12}
                wants |= {"logprob_ids": NAMED, "top_logprobs": 2, "max_new_tokens": 3}
                rank.submit("a", PROMPT, Sampling(seed=chunk), **wants)
                while rank.frontend.live or rank.frontend.queued:
                    rank.run()
                told[chunk] = rank.answer("a")
                stops[chunk].set()
            while not rank.loop.round(stops[chunk].is_set()):
                pass
        device.close()

    with meshes(2) as ends:
        assert together(ends, serve) == [None, None]
    for chunk in chunks:
        assert_prompt_told(told[chunk].prompt, PROMPT, table, chunk % 12, 2)
        assert_answer_told(told[chunk], PROMPT, expected, 2)
