"""Drawing one token a row from logits, vectorised over the rows.

Filters narrow the distribution in this order: temperature, top-k, top-p over what
top-k left, min-p. Weights are relative to the row's most likely token, whose weight
is 1; they are never normalized, the lot is scaled instead.
"""

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional

from drumline.contract.arrays import FloatArray, IntArray


class DrawSettings(Struct, frozen=True, eq=False):
    """How each row draws, `[rows]` each. `top_k` of at least the vocabulary is off."""

    greedy: np.ndarray[tuple[int], np.dtype[np.bool_]]
    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    lots: np.ndarray[tuple[int], np.dtype[np.float64]]


_CANDIDATES = 256
"""Most likely tokens that are looked at before a whole row is sorted."""
_MOST_CANDIDATES = 2048
_STRIDE = 256


def draw(logits: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
    """Return the drawn ids, and which rows' logits were not finite; `[rows]` each.

    `logits` is `[rows, vocab]`, float32. The id of a row that was not finite means
    nothing, but lies in the vocabulary.
    """
    best, tokens = logits.max(1)
    bad = ~best.isfinite()
    if settings.greedy.all():
        return tokens, bad
    vocab = logits.shape[1]
    narrowed = (settings.top_k < vocab) | (settings.top_p < 1)
    for chosen, drawn_by in (
        (np.flatnonzero(~settings.greedy & narrowed), _draw_narrowed),
        (np.flatnonzero(~settings.greedy & ~narrowed), _draw_open),
    ):
        if len(chosen):
            index = torch.from_numpy(chosen)
            scaled = logits[index] - best[index].unsqueeze(1)
            scaled /= _column(settings.temperature[chosen])
            tokens[index] = drawn_by(scaled, of_rows(settings, chosen))
    return tokens.clamp_(0, vocab - 1), bad


def of_rows(settings: DrawSettings, rows: npt.NDArray[np.int64]) -> DrawSettings:
    """Return how the chosen rows draw."""
    return DrawSettings(
        settings.greedy[rows],
        settings.temperature[rows],
        settings.top_k[rows],
        settings.top_p[rows],
        settings.min_p[rows],
        settings.lots[rows],
    )


def _column(values: FloatArray) -> Tensor:
    return torch.from_numpy(values).unsqueeze(1)


def _draw_open(scaled: Tensor, settings: DrawSettings) -> Tensor:
    """Draw from whole rows, in vocabulary order: first a stretch of tokens, then one of it."""
    weights = scaled.exp_()
    if settings.min_p.any():
        weights = weights.where(weights >= _column(settings.min_p), 0)
    if missing := -weights.shape[1] % _STRIDE:
        weights = functional.pad(weights, (0, missing))
    stretches = weights.view(len(weights), -1, _STRIDE)
    masses = stretches.sum(2)
    ends = masses.cumsum(1, dtype=torch.float64)
    target = torch.from_numpy(settings.lots) * ends[:, -1]
    stretch = _first_beyond(ends, target)
    rows = torch.arange(len(weights))
    before = ends[rows, stretch] - masses[rows, stretch]
    inner = stretches[rows, stretch].cumsum(1, dtype=torch.float64)
    return stretch * _STRIDE + _first_beyond(inner, (target - before).clamp_(min=0))


def _first_beyond(ends: Tensor, target: Tensor) -> Tensor:
    """Return, per row, the first index whose end lies beyond the target, which rounding may
    have pushed to the last end: then it is the last index that has any weight."""
    last = torch.nextafter(ends[:, -1], torch.zeros((), dtype=ends.dtype))
    return (ends <= torch.minimum(target, last).unsqueeze(1)).sum(1).clamp_(max=ends.shape[1] - 1)


def _draw_narrowed(scaled: Tensor, settings: DrawSettings) -> Tensor:
    """Draw from the most likely tokens of each row.

    As many are sorted as are needed: some hundred hold the nucleus of almost every
    row; the rows they do not suffice for are sorted whole.
    """
    vocab = scaled.shape[1]
    finite = settings.top_k[settings.top_k <= _MOST_CANDIDATES]
    count = min(vocab, max(_CANDIDATES, int(finite.max(initial=0))))
    values, ids = scaled.topk(count, 1)
    limited = settings.top_k <= count
    masses = torch.zeros(len(scaled), dtype=torch.float64)
    if not limited.all():
        index = torch.from_numpy(np.flatnonzero(~limited))
        masses[index] = scaled[index].exp_().sum(1, dtype=torch.float64)
    tokens, covered = _draw_sorted(values, ids, masses, settings, limited)
    # A top-k beyond the candidates cuts where only a whole sort can tell.
    covered &= torch.from_numpy(limited | (settings.top_k >= vocab))
    if count < vocab and not covered.all():
        rest = np.flatnonzero(~covered.numpy())
        index = torch.from_numpy(rest)
        values, ids = scaled[index].sort(1, descending=True)
        all_limited = np.ones(len(rest), np.bool_)
        tokens[index] = _draw_sorted(
            values, ids, masses[index], of_rows(settings, rest), all_limited
        )[0]
    return tokens


def _draw_sorted(
    values: Tensor,
    ids: Tensor,
    masses: Tensor,
    settings: DrawSettings,
    limited: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> tuple[Tensor, Tensor]:
    """Draw from rows sorted by descending weight; also whether what was sorted sufficed.

    A row's mass is that of its first `top_k` tokens where `limited`, else in `masses`.
    """
    count = values.shape[1]
    kept = torch.from_numpy(np.minimum(settings.top_k, count).astype(np.int64)).unsqueeze(1)
    weights = values.exp().where(torch.arange(count) < kept, 0)
    ends = weights.cumsum(1, dtype=torch.float64)
    mass = ends[:, -1].where(torch.from_numpy(limited), masses)
    nucleus = torch.from_numpy(settings.top_p.astype(np.float64)) * mass
    covered = torch.from_numpy(limited) | (ends[:, -1] >= nucleus)
    inside = (ends - weights) < nucleus.unsqueeze(1)
    inside &= weights >= _column(settings.min_p)
    inside[:, 0] = True
    ends = weights.where(inside, 0).cumsum(1, dtype=torch.float64)
    place = _first_beyond(ends, torch.from_numpy(settings.lots) * ends[:, -1])
    return ids.gather(1, place.unsqueeze(1)).squeeze(1), covered
