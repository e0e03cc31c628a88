"""Drawing one token a row from logits, vectorised over the rows.

Filters narrow the distribution in this order: temperature, top-k, top-p over what
top-k left, min-p, typical-p over what is left by then. A filter never parts tokens of
one logit: it keeps or drops them all. Weights are relative to the row's most likely
token, whose weight is 1.

Everything here is a row's own: no result depends, in any bit, on the rows beside it.
"""

from typing import Protocol

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional

from drumline.contract.arrays import FloatArray, IntArray
from drumline.contract.request import Sampling
from drumline.device.sampling import noise
from drumline.device.staging import all_on_device, on_device

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Places = np.ndarray[tuple[int], np.dtype[np.int64]]


class DrawSettings(Struct, frozen=True, eq=False):
    """How each row draws, `[rows]` each. `top_k` of at least the vocabulary is off."""

    greedy: Flags
    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    typical_p: FloatArray
    seeds: np.ndarray[tuple[int], np.dtype[np.uint64]]
    positions: Places


class RowSettings:
    """How each pool row draws, whatever is in a batch. The arrays stay where they are."""

    __slots__ = (
        "_vocab",
        "greedy",
        "min_p",
        "seeds",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    )

    def __init__(self, rows: int, vocab: int) -> None:
        self._vocab = vocab
        self.greedy = np.ones(rows, np.bool_)
        self.temperature = np.ones(rows, np.float32)
        self.top_k = np.full(rows, vocab, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.typical_p = np.ones(rows, np.float32)
        self.seeds = np.zeros(rows, np.uint64)

    def bind(self, row: int, sampling: Sampling) -> None:
        """From now on, `row` draws like this."""
        self.greedy[row] = sampling.greedy
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k, self._vocab)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.typical_p[row] = sampling.typical_p
        self.seeds[row] = sampling.seed & 0xFFFFFFFFFFFFFFFF

    def at(self, rows: IntArray, positions: IntArray) -> DrawSettings:
        """Return how the rows of a batch draw at their positions."""
        return DrawSettings(
            self.greedy[rows],
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.typical_p[rows],
            self.seeds[rows],
            positions.astype(np.int64),
        )


class Draw(Protocol):
    """Draws one token for each pool row of `rows`, to stand at `positions`; see `draw`."""

    def __call__(
        self,
        logits: Tensor,
        rows: IntArray,
        positions: IntArray,
        names: Tensor | None = None,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class TorchDraw:
    """Draws with PyTorch: the reference."""

    __slots__ = ("_settings",)

    def __init__(self, settings: RowSettings) -> None:
        self._settings = settings

    def __call__(
        self,
        logits: Tensor,
        rows: IntArray,
        positions: IntArray,
        names: Tensor | None = None,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor]:
        return draw(logits, self._settings.at(rows, positions), names, places)


_CANDIDATES = 256
"""Most likely tokens that are looked at before a whole row is sorted."""
_MOST_CANDIDATES = 2048
_STRETCH = 256
_SORTED_ENTRIES = 1 << 22
"""Logits of whole rows that are sorted at once on a device: each takes some hundred bytes."""


def draw(
    logits: Tensor,
    settings: DrawSettings,
    names: Tensor | None = None,
    rows: Places | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the drawn ids, and each row's largest logit; `[rows]` each.

    `logits` is `[rows, vocab]`, float32. Where it holds some ids of a vocabulary only, `names`
    says which, `[rows, some]`, and what is returned are places among them. With `rows`,
    ascending, only those of `logits` are drawn from, which is what `settings` is of. The id of a
    row whose largest logit is not finite means nothing, but lies in the vocabulary.
    """
    best, tokens = logits.max(1) if rows is None else _largest(logits, rows)
    if settings.greedy.all():
        return tokens, best
    vocab, device = logits.shape[1], logits.device
    keys = noise.keys(settings.seeds, settings.positions, device)
    narrowed = (settings.top_k < vocab) | (settings.top_p < 1) | (settings.typical_p < 1)
    for chosen, drawn_by in (
        (np.flatnonzero(~settings.greedy & narrowed), _draw_narrowed),
        (np.flatnonzero(~settings.greedy & ~narrowed), _draw_open),
    ):
        if len(chosen):
            index, source, temperature = all_on_device(
                device,
                chosen,
                chosen if rows is None else rows[chosen],
                settings.temperature[chosen],
            )
            scaled = logits[source] - best[index].unsqueeze(1)
            scaled /= temperature.unsqueeze(1)
            named = None if names is None else names[index]
            tokens[index] = drawn_by(scaled, keys[index], of_rows(settings, chosen), named)
    return tokens.clamp_(0, vocab - 1), best


def _largest(logits: Tensor, rows: Places) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each of `rows`, ascending, and its place."""
    # Run by run, for picking the rows would copy them whole.
    ends = np.flatnonzero(np.diff(rows) > 1) + 1
    found = [logits[int(run[0]) : int(run[-1]) + 1].max(1) for run in np.split(rows, ends)]
    return torch.cat([each.values for each in found]), torch.cat([each.indices for each in found])


def of_rows(settings: DrawSettings, rows: Places) -> DrawSettings:
    """Return how the chosen rows draw."""
    return DrawSettings(*(getattr(settings, name)[rows] for name in _SETTINGS))


_SETTINGS = DrawSettings.__struct_fields__


def _draw_open(
    scaled: Tensor, keys: Tensor, settings: DrawSettings, names: Tensor | None
) -> Tensor:
    """Draw from whole rows: first a stretch of the vocabulary by its mass, then a token of it.

    So noise is needed for some hundred entries of a row, not for each.
    """
    weights = scaled.exp_()
    device = scaled.device
    if settings.min_p.any():
        least = on_device(device, settings.min_p).unsqueeze(1)
        weights = weights.where(weights >= least, 0)
    stretches = _stretches(weights)
    masses = stretches.sum(2).double()
    # Numbers below zero are no ids: a stretch and a token never share their noise.
    numbers = -1 - torch.arange(masses.shape[1], device=device)
    stretch = (masses.log_() + noise.gumbel(keys, numbers)).argmax(1)
    inner = stretches[torch.arange(len(weights), device=device), stretch].double()
    size = inner.shape[1]
    ids = (stretch * size).unsqueeze(1) + torch.arange(size, device=device)
    named = ids if names is None else names.gather(1, ids)
    place = (inner.log_() + noise.gumbel(keys, named)).argmax(1, keepdim=True)
    return ids.gather(1, place).squeeze(1)


def _draw_narrowed(
    scaled: Tensor, keys: Tensor, settings: DrawSettings, names: Tensor | None
) -> Tensor:
    """Draw from the most likely tokens of each row.

    As many are sorted as are needed: some hundred hold the nucleus of almost every
    row; the rows they do not suffice for are sorted whole. On a device all are, for to know
    which those are takes waiting for it.
    """
    if scaled.device.type != "cpu":
        return _draw_sorted(scaled, keys, settings, names)
    vocab = scaled.shape[1]
    finite = settings.top_k[settings.top_k <= _MOST_CANDIDATES]
    count = min(vocab, max(_CANDIDATES, int(finite.max(initial=0))))
    values, ids = scaled.topk(count, 1)
    masses = torch.zeros(len(scaled), dtype=torch.float64)
    unlimited = np.flatnonzero(settings.top_k >= vocab)
    if len(unlimited):
        index = torch.from_numpy(unlimited)
        masses[index] = _mass(scaled[index])
    inside, covered = _inside(values, masses, settings, vocab)
    tokens = _pick(values, ids, inside, keys, names)
    if count < vocab and not covered.all():
        rest = np.flatnonzero(~covered.numpy())
        index = torch.from_numpy(rest)
        values, ids = scaled[index].sort(1, descending=True)
        inside, _ = _inside(values, masses[index], of_rows(settings, rest), vocab)
        # Noise for what may be drawn, not for the whole vocabulary.
        # A row without numbers may have nothing inside.
        width = int(inside.any(0).nonzero().amax()) + 1 if inside.any() else 1
        named = None if names is None else names[index]
        tokens[index] = _pick(
            values[:, :width], ids[:, :width], inside[:, :width], keys[index], named
        )
    return tokens


def _draw_sorted(
    scaled: Tensor, keys: Tensor, settings: DrawSettings, names: Tensor | None
) -> Tensor:
    """Draw from rows that are sorted whole, some at a time, for the memory it takes."""
    rows, vocab = scaled.shape
    step = max(1, _SORTED_ENTRIES // vocab)
    drawn = []
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        values, ids = scaled[part].sort(1, descending=True)
        own = of_rows(settings, np.arange(part.start, part.stop))
        inside, _ = _inside(values, _mass(scaled[part]), own, vocab)
        named = None if names is None else names[part]
        drawn.append(_pick(values, ids, inside, keys[part], named))
    return torch.cat(drawn)


def _mass(scaled: Tensor) -> Tensor:
    """Return the weight of whole rows, summed in an order that no neighbour changes."""
    return _stretches(scaled.exp()).sum(2).double().cumsum(1)[:, -1]


def _stretches(weights: Tensor) -> Tensor:
    """Return whole rows in stretches, `[rows, stretches, size]`, the last filled with zeros."""
    rows, vocab = weights.shape
    size = min(_STRETCH, vocab)
    if missing := -vocab % size:
        weights = functional.pad(weights, (0, missing))
    return weights.view(rows, -1, size)


def _inside(
    values: Tensor, masses: Tensor, settings: DrawSettings, vocab: int
) -> tuple[Tensor, Tensor]:
    """Return which of each row's candidates may be drawn, and whether no other might be.

    `values` are sorted, the largest first. `masses` are the whole rows' weights, where
    their `top_k` is off. Sums run front to back, so that more candidates add only zeros.
    """
    count = values.shape[1]
    limited, held_all, last, share, min_p = all_on_device(
        values.device,
        settings.top_k < vocab,
        settings.top_k <= count,
        np.minimum(settings.top_k, count).astype(np.int64) - 1,
        settings.top_p.astype(np.float64),
        settings.min_p,
    )
    limit = values.gather(1, last.unsqueeze(1))
    limit = limit.where(limited.unsqueeze(1), -torch.inf)
    weights = values.exp().where(values >= limit, 0)
    ends = weights.cumsum(1, dtype=torch.float64)
    mass = ends[:, -1].where(limited, masses)
    nucleus = share * mass
    before = functional.pad(ends[:, :-1], (1, 0))
    held = (before < nucleus.unsqueeze(1)).sum(1, keepdim=True).clamp_(min=1)
    least = values.gather(1, held - 1).maximum(limit)
    inside = (values >= least) & (weights >= min_p.unsqueeze(1)) & (weights > 0)
    inside[:, 0] = True
    # What lies behind the candidates must be less than the least that is kept.
    complete = (values[:, -1:] < limit).squeeze(1) & held_all
    complete |= ~limited & (ends[:, -1] >= nucleus)
    complete &= (values[:, -1:] < least).squeeze(1)
    if (settings.typical_p < 1).any():
        inside &= _typical(values, inside, settings)
    return inside, complete


def _typical(values: Tensor, inside: Tensor, settings: DrawSettings) -> Tensor:
    """Return the tokens whose surprise is closest to what is expected, `typical_p` of them."""
    share = on_device(values.device, settings.typical_p.astype(np.float64)).unsqueeze(1)
    exact = values.double()
    weights = exact.exp().where(inside, 0)
    mass = weights.cumsum(1)[:, -1:]
    chances = weights / mass
    surprise = mass.log() - exact
    expected = (chances * surprise).where(inside, 0).cumsum(1)[:, -1:]
    distance = (surprise - expected).abs_().where(inside, torch.inf)
    distance_sorted, order = distance.sort(1)
    ends = chances.gather(1, order).cumsum(1)
    before = functional.pad(ends[:, :-1], (1, 0))
    held = (before < share).sum(1, keepdim=True).clamp_(min=1)
    farthest = distance_sorted.gather(1, held - 1)
    close: Tensor = distance <= farthest
    return close | (share >= 1)


def _pick(
    values: Tensor, ids: Tensor, inside: Tensor, keys: Tensor, names: Tensor | None
) -> Tensor:
    named = ids if names is None else names.gather(1, ids)
    scores = (values + noise.gumbel(keys, named)).where(inside, -torch.inf)
    return ids.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)
