"""Tokens are drawn from the distribution that was asked for, by lots that are reproducible."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.contract.ports import LogprobPlan
from drumline.contract.request import TOP_K_OFF, Admission, Sampling
from drumline.core.errors import InvariantError
from drumline.device.sampling.draw import DrawSettings, draw
from drumline.device.sampling.lots import uniform
from drumline.device.sampling.sampler import Sampler

from .conftest import ints


def wanted_distribution(logits, *, temperature=1.0, top_k=TOP_K_OFF, top_p=1.0, min_p=0.0):
    """The distribution to draw from, in plain NumPy and double precision."""
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    order = np.argsort(-probabilities, kind="stable")
    kept = np.zeros(len(logits), bool)
    kept[order[:top_k]] = True
    probabilities = np.where(kept, probabilities, 0)
    probabilities /= probabilities.sum()
    ranked = probabilities[order]
    before = np.cumsum(ranked) - ranked
    kept[order[before >= top_p]] = False
    kept[order[0]] = True
    probabilities = np.where(kept, probabilities, 0)
    probabilities = np.where(probabilities >= min_p * probabilities.max(), probabilities, 0)
    return probabilities / probabilities.sum()


def settings_of(rows, lots, **how):
    def column(name, default, kind):
        return np.full(rows, how.get(name, default), kind)

    return DrawSettings(
        column("greedy", False, np.bool_),
        column("temperature", 1.0, np.float32),
        column("top_k", TOP_K_OFF, np.int32),
        column("top_p", 1.0, np.float32),
        column("min_p", 0.0, np.float32),
        lots,
    )


def drawn(logits, lots, **how):
    many = torch.from_numpy(np.repeat(logits[None], len(lots), 0))
    tokens, bad = draw(many, settings_of(len(lots), lots, **how))
    assert not bad.any()
    return tokens.numpy()


HOW = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.8, "min_p": 0.1},
    {"top_k": 5},
    {"top_k": 40, "temperature": 1.5},
    {"top_p": 0.7},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.02},
    # Flat enough for the nucleus to reach beyond the candidates that are sorted first.
    {"top_p": 0.9, "temperature": 9.0},
    {"top_k": 5000, "top_p": 0.95, "temperature": 9.0},
    {"top_k": 2500, "temperature": 9.0},
    {"top_k": 3000, "top_p": 0.05, "temperature": 9.0},
]


@pytest.mark.parametrize("vocab", [37, 700, 6001])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_frequencies_are_those_of_the_distribution(vocab, how):
    random = np.random.default_rng(vocab)
    logits = random.standard_normal(vocab).astype(np.float32) * 2
    expected = wanted_distribution(logits, **how)
    draws = 2000 if vocab < 1000 else 500
    lots = (np.arange(draws) + random.random(draws)) / draws
    counts = np.bincount(drawn(logits, lots, **how), minlength=vocab)
    assert not counts[expected == 0].any()
    # Evenly spread lots leave each token's count within two of what it should be.
    assert np.abs(counts - expected * draws).max() <= 2


@pytest.mark.parametrize("how", HOW[:7], ids=str)
def test_frequencies_by_seed_and_position_pass_a_chi_square_test(how):
    logits = np.random.default_rng(2).standard_normal(50).astype(np.float32) * 1.5
    draws = 4000
    lots = uniform(np.full(draws, 12345, np.uint64), np.arange(draws))
    counts = np.bincount(drawn(logits, lots, **how), minlength=50)
    expected = wanted_distribution(logits, **how) * draws
    assert not counts[expected == 0].any()
    common = expected >= 5
    cells = int(common.sum())
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    # Far beyond the 99.99th percentile of the chi-square distribution.
    assert statistic < cells + 4 * np.sqrt(2 * cells) + 10


@given(
    vocab=st.integers(2, 600),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(1, 600),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_what_is_drawn_was_allowed(vocab, temperature, top_k, top_p, min_p, seed):
    random = np.random.default_rng(seed)
    logits = random.standard_normal(vocab).astype(np.float32) * 3
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    lots = np.concatenate((random.random(20), [0.0, 1 - 2.0**-53]))
    tokens = drawn(logits, lots, **how)
    # A hair more lenient than asked: the engine's floats are single.
    lenient = how | {"top_p": min(1.0, top_p * (1 + 1e-4)), "min_p": min_p * (1 - 1e-4)}
    assert (wanted_distribution(logits, **lenient)[tokens] > 0).all()


def test_lots_are_uniform_and_differ_by_seed_and_position():
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 200)
    positions = np.tile(np.arange(200), 200)
    lots = uniform(seeds, positions)
    assert len(np.unique(lots)) == len(lots)
    assert lots.min() >= 0
    assert lots.max() < 1
    counts = np.histogram(lots, 100, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 170
    grid = lots.reshape(200, 200)
    for neighbours in (
        np.corrcoef(grid[:-1].ravel(), grid[1:].ravel()),
        np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel()),
    ):
        assert abs(neighbours[0, 1]) < 0.02


VOCAB = 300


def sampler_with(**requests):
    """A sampler whose rows 1, 2, … serve these requests."""
    sampler = Sampler(len(requests) + 1, VOCAB)
    for row, (rid, admission) in enumerate(requests.items(), 1):
        sampler.admit([Admission(rid=rid, **({"prompt_tokens": 4} | admission))])
        sampler.bind(row, rid)
    return sampler


def sample(sampler, logits, rows, positions, wanted=None):
    return sampler.sample(torch.from_numpy(logits.copy()), ints(*rows), ints(*positions), wanted)


def test_a_row_draws_the_same_whatever_runs_beside_it():
    random = np.random.default_rng(8)
    ways = [
        Sampling(seed=5),
        Sampling(seed=-5, top_p=0.8),
        Sampling(top_k=1),
        Sampling(seed=2**63 - 1, top_k=20, min_p=0.05, temperature=0.7),
        Sampling(seed=77, top_p=0.99, temperature=30.0),
    ]
    sampler = sampler_with(**{f"r{i}": {"sampling": way} for i, way in enumerate(ways)})
    logits = random.standard_normal((5, VOCAB)).astype(np.float32)
    for position in range(4, 30):
        together = sample(sampler, logits, range(1, 6), [position] * 5).tokens.tolist()
        alone = [
            sample(sampler, logits[i : i + 1], [i + 1], [position]).tokens.item() for i in range(5)
        ]
        assert together == alone


def test_equal_seeds_draw_equal_tokens_and_other_seeds_others():
    ways = {"a": {"sampling": Sampling(seed=1)}, "b": {"sampling": Sampling(seed=1)}}
    sampler = sampler_with(**ways, c={"sampling": Sampling(seed=2)})
    logits = np.zeros((3, VOCAB), np.float32)
    drawn_by = [sample(sampler, logits, [1, 2, 3], [p] * 3).tokens.tolist() for p in range(20)]
    assert all(a == b for a, b, _ in drawn_by)
    assert sum(a != c for a, _, c in drawn_by) > 15


def test_biases_move_logits_and_end_tokens_wait_for_the_minimum():
    sampler = sampler_with(
        biased={"sampling": Sampling(top_k=1, logit_bias={7: 3.0, 9: -100.0})},
        patient={"sampling": Sampling(top_k=1), "min_new_tokens": 2, "stop_token_ids": (9, 11)},
        plain={"sampling": Sampling(top_k=1)},
    )
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 9] = 5
    logits[:, 11] = 4
    logits[:, 7] = 2.5
    logits[:, 200] = 1
    # Four prompt tokens: at position 4 stands the first new one.
    for position, patient in ((4, 7), (5, 7), (6, 9)):
        got = sample(sampler, logits, [1, 2, 3], [position] * 3).tokens.tolist()
        assert got == [7, patient, 9]


def penalized(logits, prompt, said, repetition, frequency, presence):
    """What the penalties make of logits, token by token."""
    logits = logits.astype(np.float64).copy()
    for token in set(prompt) | set(said):
        value = logits[token]
        logits[token] = value / repetition if value > 0 else value * repetition
    for token in set(said):
        logits[token] -= frequency * said.count(token) + presence
    return logits


def test_penalties_follow_prompt_and_answer():
    random = np.random.default_rng(11)
    logits = (random.standard_normal(VOCAB) * 2).astype(np.float32)
    prompt = random.integers(0, VOCAB, 40).tolist()
    ways = {
        "repetition": (1.4, 0.0, 0.0),
        "frequency": (1.0, 0.9, 0.0),
        "presence": (1.0, 0.0, 1.1),
        "all": (1.2, 0.3, 0.4),
        "encouraged": (0.8, -0.2, -0.1),
    }
    sampler = sampler_with(
        **{
            name: {
                "sampling": Sampling(
                    top_k=1,
                    repetition_penalty=repetition,
                    frequency_penalty=frequency,
                    presence_penalty=presence,
                ),
                "prompt_ids": ints(*prompt),
                "prompt_tokens": 40,
            }
            for name, (repetition, frequency, presence) in ways.items()
        },
        plain={"sampling": Sampling(top_k=1)},
    )
    said = {name: [] for name in ways}
    for position in range(40, 70):
        many = np.repeat(logits[None], 6, 0)
        got = sample(sampler, many, range(1, 7), [position] * 6).tokens.tolist()
        for (name, penalties), token in zip(ways.items(), got, strict=False):
            edited = penalized(logits, prompt, said[name], *penalties)
            assert edited[token] >= edited.max() - 1e-5
            said[name].append(token)
        assert got[-1] == logits.argmax()
    assert len(set(said["frequency"])) > 5


def test_what_a_request_said_follows_it_to_another_row_and_ends_with_it():
    way = Sampling(top_k=1, presence_penalty=2.0)
    sampler = sampler_with(first={"sampling": way}, second={"sampling": way})
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :3] = [1.5, 1.0, 0.5]
    assert sample(sampler, logits, [1], [4]).tokens.tolist() == [0]
    # It moves to a row that somebody else had, whose own row stays untouched.
    sampler.bind(2, "first")
    assert sample(sampler, logits, [2], [5]).tokens.tolist() == [1]
    sampler.bind(1, "second")
    assert sample(sampler, logits, [1], [4]).tokens.tolist() == [0]
    sampler.release(["first", "second", "unknown"])
    sampler.admit([Admission(rid="first", prompt_tokens=4, sampling=way)])
    sampler.bind(2, "first")
    assert sample(sampler, logits, [2], [4]).tokens.tolist() == [0]


def test_a_row_is_bound_to_an_admitted_request_only():
    with pytest.raises(InvariantError, match="'ghost', which was never admitted"):
        Sampler(3, VOCAB).bind(1, "ghost")


@pytest.mark.parametrize("way", [Sampling(top_k=1), Sampling(), Sampling(top_p=0.5)], ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_flagged_by_row(way, poison):
    sampler = sampler_with(a={"sampling": way}, b={"sampling": way}, c={"sampling": way})
    logits = np.random.default_rng(1).standard_normal((3, VOCAB)).astype(np.float32)
    clean = sample(sampler, logits, [1, 2, 3], [9] * 3)
    assert not clean.bad.any()
    logits[1, 17] = poison
    sampled = sample(sampler, logits, [1, 2, 3], [9] * 3)
    assert sampled.bad.tolist() == [False, True, False]
    assert sampled.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()
    assert 0 <= sampled.tokens[1] < VOCAB
    logits[1] = -np.inf
    assert sample(sampler, logits, [1, 2, 3], [9] * 3).bad.tolist() == [False, True, False]


def test_log_probabilities_are_the_model_s_own():
    sampler = sampler_with(
        a={"sampling": Sampling(top_k=1, logit_bias={5: 50.0})},
        b={"sampling": Sampling(top_k=1)},
        c={"sampling": Sampling(temperature=0.3, seed=3)},
    )
    logits = np.random.default_rng(4).standard_normal((3, VOCAB)).astype(np.float32)
    wanted = LogprobPlan(ints(0, 2), ints(3, 0))
    sampled = sample(sampler, logits, [1, 2, 3], [4, 4, 4], wanted)
    expected = np.log(wanted_distribution(logits[0]))
    first, second = sampled.logprobs
    assert (first.index, second.index) == (0, 2)
    assert sampled.tokens[0] == 5
    assert first.sampled == pytest.approx([expected[5]], abs=1e-5)
    best = np.argsort(-expected)[:3]
    assert first.top_ids == (tuple(best),)
    assert first.top_values[0] == pytest.approx(expected[best], abs=1e-5)
    token = sampled.tokens[2]
    assert second.sampled == pytest.approx(
        [np.log(wanted_distribution(logits[2]))[token]], abs=1e-5
    )
    assert second.top_ids == ()
