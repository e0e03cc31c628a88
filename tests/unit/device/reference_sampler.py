"""The sampler again, in plain NumPy and double precision, one token and one rule at a time."""

import math

import numpy as np

OFF = 1 << 30


def edited(
    logits,
    prompt,
    said,
    *,
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    logit_bias=None,
    bad_words=(),
    allowed_ids=(),
    **_filters,
):
    """What a request makes of logits behind `prompt` and `said`."""
    logits = logits.astype(np.float64).copy()
    for token, bias in (logit_bias or {}).items():
        logits[token] += bias
    read = [*prompt, *said]
    for word in bad_words:
        if len(word) == 1 or tuple(read[-len(word) + 1 :]) == tuple(word[:-1]):
            logits[word[-1]] = -np.inf
    for token in set(read):
        value = logits[token]
        logits[token] = value / repetition_penalty if value > 0 else value * repetition_penalty
    for token in set(said):
        logits[token] -= frequency_penalty * said.count(token) + presence_penalty
    if allowed_ids:
        hidden = np.ones(len(logits), bool)
        hidden[list(allowed_ids)] = False
        logits[hidden] = -np.inf
    return logits


def reference(logits, *, temperature=1.0, top_k=OFF, top_p=1.0, min_p=0.0, typical_p=1.0, **_edits):
    """The distribution to draw from."""
    scaled = logits.astype(np.float64) / np.float32(temperature)
    weights = np.exp(scaled - scaled.max())
    kept = scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
    weights = np.where(kept, weights, 0)
    weights = _smallest_set(weights, weights / weights.sum(), -weights, np.float32(top_p))
    weights = np.where(weights >= np.float32(min_p) * weights.max(), weights, 0)
    if typical_p < 1:
        chances = weights / weights.sum()
        surprise = -np.log(np.where(chances > 0, chances, 1))
        expected = (chances * surprise).sum()
        distance = np.where(chances > 0, np.abs(surprise - expected), np.inf)
        weights = _smallest_set(weights, chances, distance, np.float32(typical_p))
    return weights / weights.sum()


def _smallest_set(weights, chances, rank, share):
    """Keep the first tokens by `rank` whose chances together reach `share`, ties as one."""
    order = np.argsort(rank, kind="stable")
    before = np.cumsum(chances[order]) - chances[order]
    last = max(int((before < share).sum()), 1) - 1
    return np.where(rank <= rank[order[last]], weights, 0)


STRETCH = 256
WORD = (1 << 64) - 1


def draw_of(chances, seed, position, *, narrowed):
    """The token that a seed draws at a place: of all that are left where a filter narrowed the
    vocabulary, else of the stretch of it that was drawn first."""
    key = _mixed(_mixed(seed) ^ (position * 0x9E3779B97F4A7C15 & WORD))
    first, last = 0, len(chances)
    if not narrowed:
        masses = [chances[at : at + STRETCH].sum() for at in range(0, len(chances), STRETCH)]
        first = STRETCH * _likeliest(masses, key, lambda stretch: -1 - stretch)
        last = first + STRETCH
    return first + _likeliest(chances[first:last], key, lambda place: first + place)


def _likeliest(weights, key, number):
    scores = [
        math.log(weight) + _gumbel(key, number(place)) if weight else -math.inf
        for place, weight in enumerate(weights)
    ]
    return int(np.argmax(scores))


def _gumbel(key, token):
    mixed = _mixed(key ^ (token * 0x9E3779B97F4A7C15 & WORD))
    return -math.log(-math.log(((mixed >> 12) + 0.5) * 2.0**-52))


def _mixed(state):
    state = state + 0x9E3779B97F4A7C15 & WORD
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & WORD
    return state ^ (state >> 31)
