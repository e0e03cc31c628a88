"""Kernels draw what PyTorch draws, tell and penalize the same, and a row alone is as in a batch."""

import numpy as np
import pytest
import torch

from drumline.contract.ports import LogprobPlan
from drumline.contract.request import Admission, Sampling
from drumline.device.kernels.native import Machine, find_kernels
from drumline.device.kernels.trial import tried
from drumline.device.sampling.constraints import HANDFUL
from drumline.device.sampling.draw import RowSettings, TorchDraw
from drumline.device.sampling.logprobs import look_up
from drumline.device.sampling.native_draw import NativeDraw
from drumline.device.sampling.sampler import Sampler
from drumline.device.staging import Download

from .conftest import ints


@pytest.fixture(scope="module")
def machine():
    found = find_kernels(tried)
    assert found.kernels is not None, found.why_none
    return Machine(found.kernels, 2)


def told_at(logits, *how, **more):
    looked = look_up(logits, *how, **more)
    return looked.told(iter(Download(looked.tensors, logits.device).wait()))


def way(random, vocab):
    """A way of drawing: some filters are on, each anywhere in its range."""
    chosen = {
        "temperature": float(random.choice([0.1, 0.7, 1, 1.5, 8])),
        "seed": int(random.integers(99)),
    }
    if random.random() < 0.4:
        chosen["top_k"] = int(random.integers(1, max(2, min(vocab, 900))))
    if random.random() < 0.4:
        chosen["top_p"] = float(random.uniform(0.05, 1))
    if random.random() < 0.3:
        chosen["min_p"] = float(random.uniform(0, 0.4))
    if random.random() < 0.2:
        chosen["typical_p"] = float(random.uniform(0.1, 1))
    return Sampling(**chosen)


def logits_of(random, rows, vocab):
    """Logits sharp or flat, some of them with ties, some with ids that may not come."""
    logits = random.standard_normal((rows, vocab)).astype(np.float32) * random.choice([0.3, 1, 4])
    if random.random() < 0.3:
        logits = np.round(logits)
    if random.random() < 0.3:
        logits[:, random.random(vocab) < 0.9] = -np.inf
        logits[:, -1] = 0
    return torch.from_numpy(logits.astype(np.float32))


def both(machine, random, rows, vocab):
    settings = RowSettings(rows, vocab)
    for row in range(rows):
        settings.bind(row, way(random, vocab))
    return TorchDraw(settings), NativeDraw(machine, settings)


VOCABULARIES = [1, 7, 64, 257, 700, 5003]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_kernels_draw_the_tokens_that_torch_draws(machine, vocab):
    random = np.random.default_rng(vocab)
    for turn in range(60):
        rows = int(random.choice([1, 2, 9]))
        reference, kernels = both(machine, random, rows, vocab)
        logits = logits_of(random, rows, vocab)
        order = random.permutation(rows).astype(np.int32)
        positions = random.integers(0, 5000, rows).astype(np.int32)
        (expected, largest), (drawn, best) = (
            one(logits.clone(), order, positions) for one in (reference, kernels)
        )
        assert drawn.tolist() == expected.tolist(), turn
        assert torch.equal(best, largest)
        alone = [
            kernels(logits[i : i + 1], order[i : i + 1], positions[i : i + 1])[0].item()
            for i in range(rows)
        ]
        assert drawn.tolist() == alone


def test_rows_among_others_and_places_with_names_are_drawn_like_torch_draws_them(machine):
    random = np.random.default_rng(4)
    for _ in range(30):
        reference, kernels = both(machine, random, 8, HANDFUL)
        logits = logits_of(random, 8, HANDFUL)
        places = np.flatnonzero(random.random(8) < 0.5)
        positions = random.integers(0, 99, 8).astype(np.int32)
        if len(places):
            rows = places.astype(np.int32)
            drawn = [
                one(logits.clone(), rows, positions[rows], places=places)[0].tolist()
                for one in (reference, kernels)
            ]
            assert drawn[0] == drawn[1]
        names = torch.from_numpy(np.sort(random.choice(40_000, (8, HANDFUL))))
        rows = np.arange(8, dtype=np.int32)
        drawn = [
            one(logits.clone(), rows, positions, names)[0].tolist() for one in (reference, kernels)
        ]
        assert drawn[0] == drawn[1]


def test_the_largest_is_taken_wherever_it_stands_and_what_is_no_number_is_told(machine):
    settings = RowSettings(3, 203)
    settings.greedy[:] = True
    draw = NativeDraw(machine, settings)
    rows, positions = ints(0, 1, 2), ints(0, 0, 0)
    for place in range(203):
        logits = torch.full((3, 203), -3.0)
        logits[0, place] = 2
        logits[1, place] = torch.nan
        logits[2] = -torch.inf
        tokens, best = draw(logits, rows, positions)
        assert tokens[0] == place
        assert best[0] == 2
        assert best[1].isnan()
        assert best[2] == -torch.inf
        assert ((tokens >= 0) & (tokens < 203)).all()
        logits[1, place] = torch.inf
        assert draw(logits, rows, positions)[1][1] == torch.inf


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_log_probabilities_are_those_of_torch(machine, vocab):
    random = np.random.default_rng(vocab)
    for _ in range(15):
        rows = int(random.choice([1, 5]))
        logits = torch.from_numpy(random.standard_normal((rows + 2, vocab)).astype(np.float32) * 3)
        logits[:, :: 2 + int(random.integers(9))] -= 50
        if vocab > 20 and random.random() < 0.5:
            logits[:, 10:] = -torch.inf
        places = torch.from_numpy(random.permutation(rows + 2)[:rows])
        tokens = torch.from_numpy(random.integers(0, vocab, rows))
        top = random.integers(0, 21, rows).astype(np.int32)
        named = [tuple(random.integers(0, vocab, random.integers(4)).tolist()) for _ in range(rows)]
        (own, told), (expected_own, expected) = (
            told_at(logits, tokens, top, named, places, one) for one in (machine, None)
        )
        np.testing.assert_allclose(own, expected_own, rtol=1e-5, atol=1e-5)
        for (values, ids), (expected_values, expected_ids) in zip(told, expected, strict=True):
            np.testing.assert_allclose(values, expected_values, rtol=1e-5, atol=1e-5)
            assert len(ids) == len(expected_ids)
            finite = np.isfinite(values)
            assert np.array(ids)[finite].tolist() == np.array(expected_ids)[finite].tolist()


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99, 1])
def test_the_likeliest_of_a_row_that_holds_what_is_no_number_are_ids_of_it(machine, share):
    random = np.random.default_rng(3)
    vocab, count = 5003, 20
    for _ in range(20):
        logits = torch.from_numpy(random.standard_normal((1, vocab)).astype(np.float32))
        logits[torch.from_numpy(random.random((1, vocab)) < share)] = torch.nan
        # Of a machine of its own, whose memory no row of numbers has filled.
        fresh = Machine(machine.kernels, 1)
        _, [(values, ids)] = told_at(
            logits, torch.tensor([4]), np.array([count], np.int32), [()], machine=fresh
        )
        assert len(set(ids)) == len(values) == count
        assert all(0 <= id_ < vocab for id_ in ids)


EDITING = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": -0.3},
    {"repetition_penalty": 0.6, "presence_penalty": 1.0, "top_p": 0.8, "seed": 3},
    {"top_k": 1, "logit_bias": {3: 9.0}},
    {},
]


def test_an_answer_with_penalties_and_log_probabilities_is_that_of_the_reference(machine):
    random = np.random.default_rng(6)
    samplers = [Sampler(6, 300, machine=one) for one in (None, machine)]
    for sampler in samplers:
        for row, how in enumerate(EDITING):
            admission = Admission(
                rid=str(row),
                prompt_tokens=4,
                prompt_ids=ints(5, 9, 9, 200),
                sampling=Sampling(**how),
                logprob_ids=(7,) if row == 2 else (),
            )
            sampler.admit([admission])
            sampler.bind(row, str(row))
    rows = np.arange(len(EDITING), dtype=np.int32)
    wanted = LogprobPlan(ints(0, 2, 4), ints(0, 3, 1))
    for position in range(4, 60):
        logits = torch.from_numpy(random.standard_normal((len(rows), 300)).astype(np.float32) * 2)
        positions = np.full(len(rows), position, np.int32)
        expected, got = (one.sample(logits.clone(), rows, positions, wanted) for one in samplers)
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert not got.bad.any()
        for mine, theirs in zip(got.logprobs, expected.logprobs, strict=True):
            assert mine.top_ids == theirs.top_ids
            np.testing.assert_allclose(mine.sampled, theirs.sampled, atol=1e-5)
            for values, others in zip(mine.top_values, theirs.top_values, strict=True):
                np.testing.assert_allclose(values, others, atol=1e-5)
