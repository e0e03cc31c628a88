"""Tokens are drawn from the distribution that was asked for, by noise that is reproducible."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.contract.ports import LogprobPlan
from drumline.contract.request import Admission, Sampling
from drumline.core.errors import InvariantError
from drumline.device.sampling import noise
from drumline.device.sampling.sampler import Sampler

from .conftest import ints
from .reference_sampler import draw_of, edited, reference

DRAWS = 50_000
FEW_DRAWS = 6_000
AT_ONCE = 2_000

FEATURES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.8},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "typical-p": {"typical_p": 0.6},
    "biases": {"logit_bias": {3: 2.5, 17: -4.0, 40: 1.0}},
    "allowed ids": {"allowed_ids": tuple(range(10, 40))},
    "bad words": {"bad_words": ((4,), (7, 2, 30), (2, 5), (9, 2, 6))},
    "repetition": {"repetition_penalty": 1.7},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": -0.9},
}
COMBINED = {
    "top-k, temperature": {"top_k": 20, "temperature": 1.5},
    "top-k, top-p, min-p": {"top_k": 30, "top_p": 0.8, "min_p": 0.02},
    "min-p, hot": {"min_p": 0.1, "temperature": 1.8},
    "typical-p behind top-p": {"typical_p": 0.8, "top_p": 0.9, "temperature": 1.3},
    "typical-p behind top-k": {"typical_p": 0.5, "top_k": 12},
    "typical-p, min-p": {"typical_p": 0.7, "min_p": 0.05},
    "all penalties": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.5,
        "top_p": 0.9,
    },
    "everything": {
        "temperature": 1.4,
        "top_k": 25,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "logit_bias": {3: 2.0, 11: -1.0},
        "bad_words": ((4,), (2, 5)),
        "allowed_ids": tuple(range(45)),
    },
}
NARROWING = {"top_k", "top_p", "typical_p"}
PROMPT = [9, 31, 31, 12, 7, 2]
SAID = [20, 20, 33, 7, 2]
"""What a request with penalties or bad words has said before each draw."""


def frequencies(logits, how, draws=DRAWS):
    """How often each token is drawn, each time by another seed and for another place."""
    counts = np.zeros(len(logits), np.int64)
    many = torch.from_numpy(logits).repeat(AT_ONCE, 1)
    rows = np.ones(AT_ONCE, np.int32)
    for first in range(0, draws, AT_ONCE):
        sampler = sampler_with(
            a={
                "sampling": Sampling(seed=first, **how),
                "prompt_tokens": len(PROMPT),
                "prompt_ids": ints(*PROMPT),
            },
            vocab=len(logits),
        )
        # Said by hand: what the rules forbid must not depend on what they let through before.
        for token in SAID:
            sampler._edits.remember([(0, sampler.resident(1))], torch.tensor([token]))
        positions = 100 + np.arange(AT_ONCE, dtype=np.int32)
        sampled = sampler.sample(many.clone(), rows, positions)
        assert not sampled.bad.any()
        counts += np.bincount(sampled.tokens.numpy(), minlength=len(logits))
    return counts


def assert_drawn_from(counts, expected):
    """A chi-square test, at about one false alarm in 30,000."""
    assert not counts[expected == 0].any()
    wanted = expected * counts.sum()
    common = wanted >= 5
    # What is too rare for a cell of its own shares one.
    cells = [*zip(counts[common], wanted[common], strict=True)]
    if wanted[~common].sum() >= 5:
        cells.append((counts[~common].sum(), wanted[~common].sum()))
    statistic = sum((got - due) ** 2 / due for got, due in cells)
    freedom = max(len(cells) - 1, 1)
    # The cube of a chi-square variable over its freedom is nearly normal (Wilson and Hilferty).
    score = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(
        2 / (9 * freedom)
    )
    assert score < 4


@pytest.mark.parametrize("name", [*FEATURES, *COMBINED])
def test_tokens_are_drawn_from_the_distribution_asked_for(name):
    how = {**FEATURES, **COMBINED}[name]
    logits = np.random.default_rng(2).standard_normal(50).astype(np.float32) * 1.5
    counts = frequencies(logits, how)
    assert_drawn_from(counts, reference(edited(logits, PROMPT, SAID, **how), **how))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"min_p": 0.02},
        # Flat enough to reach beyond the candidates that are sorted first.
        {"top_p": 0.9, "temperature": 9.0},
        {"top_k": 500, "top_p": 0.95, "temperature": 9.0},
        {"top_k": 310, "temperature": 9.0},
        {"typical_p": 0.8, "temperature": 2.0},
    ],
    ids=str,
)
def test_a_vocabulary_of_several_stretches_is_drawn_from_as_asked(how):
    logits = np.random.default_rng(5).standard_normal(701).astype(np.float32) * 2
    counts = frequencies(logits, how, FEW_DRAWS)
    assert_drawn_from(counts, reference(logits, **how))


def test_an_answer_token_by_token_is_that_of_the_reference():
    random = np.random.default_rng(12)
    ways = [*FEATURES.values(), *COMBINED.values()]
    sampler = sampler_with(
        **{
            f"r{i}": {
                "sampling": Sampling(seed=i, **how),
                "prompt_ids": ints(*PROMPT),
                "prompt_tokens": len(PROMPT),
            }
            for i, how in enumerate(ways)
        }
    )
    said = [[] for _ in ways]
    for position in range(len(PROMPT), len(PROMPT) + 25):
        logits = random.standard_normal((len(ways), VOCAB)).astype(np.float32) * 3
        logits[:, 50:] -= 4  # so that words are banned now and then
        got = sample(sampler, logits, range(1, len(ways) + 1), [position] * len(ways))
        for row, how in enumerate(ways):
            changed = edited(logits[row], PROMPT, said[row], **how)
            chances = reference(changed, **how)
            expected = draw_of(chances, row, position, narrowed=bool(NARROWING & how.keys()))
            assert got.tokens[row] == expected, (how, position)
            said[row].append(int(got.tokens[row]))


@given(
    vocab=st.integers(2, 600),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(1, 600),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0.01, 1),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_what_is_drawn_was_allowed(vocab, seed, **how):
    logits = np.random.default_rng(seed).standard_normal(vocab).astype(np.float32) * 3
    sampler = Sampler(2, vocab)
    sampler.admit([Admission(rid="a", prompt_tokens=1, sampling=Sampling(seed=seed, **how))])
    sampler.bind(1, "a")
    # A hair more lenient than asked: the engine's floats are single.
    lenient = how | {
        "top_p": min(1.0, how["top_p"] * (1 + 1e-4)),
        "min_p": how["min_p"] * (1 - 1e-4),
        "typical_p": 1.0,
    }
    allowed = reference(logits, **lenient) > 0
    for position in range(20):
        assert allowed[sample(sampler, logits[None], [1], [position]).tokens.item()]


@pytest.mark.parametrize("how", [{"top_k": 3}, {"top_p": 0.5}, {"typical_p": 0.5}, {}], ids=str)
def test_tokens_of_one_logit_are_kept_or_dropped_together(how):
    logits = np.full(600, -30.0, np.float32)
    logits[[5, 90, 300, 599]] = 2.0  # more of one kind than a top-k of three
    sampler = Sampler(2, 600)
    sampler.admit([Admission(rid="a", prompt_tokens=1, sampling=Sampling(**how))])
    sampler.bind(1, "a")
    drawn = {sample(sampler, logits[None], [1], [at]).tokens.item() for at in range(200)}
    assert drawn == {5, 90, 300, 599}


@pytest.mark.parametrize(
    "how", [{}, {"top_p": 0.9}, {"top_k": 40, "typical_p": 0.9}, {"temperature": 0.3}], ids=str
)
def test_logits_that_differ_in_their_last_digits_draw_the_same(how):
    random = np.random.default_rng(6)
    sampler = Sampler(2, 4000)
    sampler.admit([Admission(rid="a", prompt_tokens=1, sampling=Sampling(**how))])
    sampler.bind(1, "a")
    same = 0
    for position in range(150):
        logits = random.standard_normal((1, 4000)).astype(np.float32) * 3
        shaken = logits + random.standard_normal((1, 4000)).astype(np.float32) * 1e-5
        first, second = (
            sample(sampler, each, [1], [position]).tokens.item() for each in (logits, shaken)
        )
        same += first == second
    assert same == 150


def test_noise_is_spread_as_it_should_and_differs_by_seed_place_and_token():
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 20)
    positions = np.tile(np.arange(20), 100)
    values = noise.gumbel(noise.keys(seeds, positions), torch.arange(-10, 15)).numpy()
    assert len(np.unique(values)) == values.size
    uniform = np.exp(-np.exp(-values)).reshape(100, 20, 25)
    counts = np.histogram(uniform, 100, (0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 170
    for axis in range(3):
        lined = np.moveaxis(uniform, axis, 0)
        assert abs(np.corrcoef(lined[:-1].ravel(), lined[1:].ravel())[0, 1]) < 0.02


VOCAB = 300


def sampler_with(vocab=VOCAB, **requests):
    """A sampler whose rows 1, 2, … serve these requests."""
    sampler = Sampler(len(requests) + 1, vocab)
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
        Sampling(seed=78, typical_p=0.9, temperature=30.0),
        Sampling(seed=79, top_k=290, temperature=30.0),
        Sampling(seed=80, allowed_ids=(3, 4, 5), bad_words=((4,), (3, 5))),
    ]
    sampler = sampler_with(**{f"r{i}": {"sampling": way} for i, way in enumerate(ways)})
    logits = random.standard_normal((len(ways), VOCAB)).astype(np.float32)
    other = sampler_with(**{f"r{i}": {"sampling": way} for i, way in enumerate(ways)})
    for position in range(4, 30):
        together = sample(sampler, logits, range(1, 9), [position] * 8).tokens.tolist()
        alone = [
            sample(other, logits[i : i + 1], [i + 1], [position]).tokens.item() for i in range(8)
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
            how = dict(
                zip(
                    ("repetition_penalty", "frequency_penalty", "presence_penalty"),
                    penalties,
                    strict=True,
                )
            )
            changed = edited(logits, prompt, said[name], **how)
            assert changed[token] >= changed.max() - 1e-5
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


@pytest.mark.parametrize(
    "way",
    [Sampling(top_k=1), Sampling(), Sampling(top_p=0.5), Sampling(min_p=0.1)],
    ids=str,
)
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


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "way",
    [{"typical_p": 0.5}, {"typical_p": 0.5, "top_k": 600}, {"top_p": 0.9}, {"top_k": 600}],
    ids=str,
)
def test_rows_without_numbers_are_flagged_in_large_vocabularies_too(way, poison):
    large = 3000  # more than the candidates that are looked at first
    sampler = Sampler(3, large)
    sampler.admit(
        [
            Admission(rid=rid, prompt_tokens=4, sampling=Sampling(seed=2, **way))
            for rid in ("well", "ill")
        ]
    )
    sampler.bind(1, "well")
    sampler.bind(2, "ill")
    logits = np.random.default_rng(1).standard_normal((2, large)).astype(np.float32)
    clean = sample(sampler, logits, [1, 2], [9, 9])
    logits[1] = poison
    for rows in ([0, 1], [1]):
        sampled = sample(sampler, logits[rows], [row + 1 for row in rows], [9] * len(rows))
        assert sampled.bad.tolist() == [row == 1 for row in rows]
        assert 0 <= sampled.tokens[-1] < large
    assert sample(sampler, logits, [1, 2], [9, 9]).tokens[0] == clean.tokens[0]


def test_log_probabilities_are_the_model_s_own():
    sampler = sampler_with(
        a={"sampling": Sampling(top_k=1, logit_bias={5: 50.0})},
        b={"sampling": Sampling(top_k=1)},
        c={"sampling": Sampling(temperature=0.3, seed=3)},
    )
    logits = np.random.default_rng(4).standard_normal((3, VOCAB)).astype(np.float32)
    wanted = LogprobPlan(ints(0, 2), ints(3, 0))
    sampled = sample(sampler, logits, [1, 2, 3], [4, 4, 4], wanted)
    expected = np.log(reference(logits[0]))
    first, second = sampled.logprobs
    assert (first.index, second.index) == (0, 2)
    assert sampled.tokens[0] == 5
    assert first.sampled == pytest.approx([expected[5]], abs=1e-5)
    best = np.argsort(-expected)[:3]
    assert first.top_ids == (tuple(best),)
    assert first.top_values[0] == pytest.approx(expected[best], abs=1e-5)
    token = sampled.tokens[2]
    assert second.sampled == pytest.approx([np.log(reference(logits[2]))[token]], abs=1e-5)
    assert second.top_ids == ()
