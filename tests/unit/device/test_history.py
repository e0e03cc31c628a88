"""Models that look back on tokens find them, whatever became of rows and caches."""

import numpy as np
import pytest
import torch

from drumline.contract.request import Sampling
from drumline.contract.specs import HistoryNeed
from drumline.device import weight_loader

from .small_rank import GREEDY, SmallDevice, SmallRank

VOCAB = 320
RANDOM = np.random.default_rng(41)
SHARED = RANDOM.integers(0, VOCAB, 40).tolist()
PROMPTS = [
    [*SHARED, 7],
    SHARED[:33] + RANDOM.integers(0, VOCAB, 20).tolist(),
    RANDOM.integers(0, VOCAB, 5).tolist(),
    SHARED + RANDOM.integers(0, VOCAB, 11).tolist(),
    [9],
]
TOKENS = 15


class LookingBack:
    """Says what follows from the last tokens; with `lookback` None, from all there ever were.

    It computes no attention: all it knows of before is its history.
    """

    def __init__(self, lookback):
        self.history = HistoryNeed(lookback)

    def hidden(self, ids, batch, attention, fence=None):
        read = batch.history
        if self.history.lookback is None:
            weights = torch.arange(1, read.tokens.shape[1] + 1)
            before = torch.arange(read.tokens.shape[1]) < read.positions.unsqueeze(1)
            mixed = (read.tokens[read.rows] * weights).where(before, 0).sum(1)
        else:
            window = read.windows(self.history.lookback)
            mixed = (window * torch.arange(3, 3 + self.history.lookback)).sum(1)
        return ((mixed + 31 * ids + 7 * read.positions) % VOCAB).unsqueeze(1)

    def logits(self, hidden):
        return torch.nn.functional.one_hot(hidden.squeeze(1), VOCAB).float()


def following(lookback, tokens):
    """What such a model says behind `tokens`, computed from the list alone."""
    at = len(tokens) - 1
    if lookback is None:
        mixed = sum(token * (place + 1) for place, token in enumerate(tokens[:-1]))
    else:
        window = [tokens[at - 1 - k] if at - 1 - k >= 0 else -1 for k in range(lookback)]
        mixed = sum(token * (3 + k) for k, token in enumerate(window))
    return (mixed + 31 * tokens[-1] + 7 * at) % VOCAB


def answer(lookback, prompt):
    tokens = list(prompt)
    for _ in range(TOKENS):
        tokens.append(following(lookback, tokens))
    return tokens[len(prompt) :]


@pytest.fixture(params=[None, 0, 1, 3, 20], ids=lambda lookback: f"lookback {lookback}")
def model(request, checkpoint, monkeypatch):
    monkeypatch.setattr(weight_loader, "load_decoder", lambda *_: (LookingBack(request.param), {}))
    device = SmallDevice(checkpoint("llama")[1], pages=30, rows=3)
    yield request.param, device
    device.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_follow_from_all_that_was_read_and_said(model, depth):
    lookback, device = model
    expected = [answer(lookback, prompt) for prompt in PROMPTS]
    for chunk, retract in ((64, 0), (7, 0), (16, 3), (5, 2)):
        rank = SmallRank(device, depth=depth, chunk=chunk, retract=retract)
        # More requests than rows, thrice: rows change owners, and prefixes are cached.
        for time in range(3):
            for which, prompt in enumerate(PROMPTS):
                rank.submit(f"{which}, {time}", prompt, GREEDY, max_new_tokens=TOKENS)
                rank.run(which % 3)
            rank.submit(f"gone {time}", PROMPTS[1], Sampling(seed=1), max_new_tokens=50)
            rank.run(4)
            rank.abort(f"gone {time}")
            rank.finish()
            for which in range(len(PROMPTS)):
                assert rank.answer(f"{which}, {time}").ids == expected[which]
        cached = [rank.answer(f"{which}, 2").cached_tokens for which in range(len(PROMPTS))]
        assert cached[0] == 40 or cached[0] >= 32


def test_no_more_is_seeded_than_the_model_looks_back(model):
    lookback, device = model
    rank = SmallRank(device, chunk=64)
    seeds = []
    execute = rank.plane.execute

    def noting(plan, dispatch):
        if plan.batch is not None and dispatch.history is not None:
            seeds.append(dispatch.history)
        return execute(plan, dispatch)

    rank.plane = None
    forwards = rank.loop._forwards
    forwards._data_plane = _Noting(forwards._data_plane, noting)
    for time in range(2):
        rank.submit(f"{time}", PROMPTS[3], GREEDY, max_new_tokens=TOKENS)
        rank.finish()
    first, second = seeds
    assert (first.prefix_lengths.tolist(), len(first.tokens)) == ([0], 0)
    prefix = int(second.prefix_lengths[0])
    assert prefix >= 32
    start = 0 if lookback is None else max(0, prefix - lookback)
    assert second.starts.tolist() == [start]
    assert second.tokens.tolist() == PROMPTS[3][start:prefix]


class _Noting:
    """A data plane whose plans are looked at."""

    def __init__(self, plane, execute):
        self._plane = plane
        self.execute = execute

    def __getattr__(self, name):
        return getattr(self._plane, name)
