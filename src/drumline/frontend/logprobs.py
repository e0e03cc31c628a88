"""What is told of tokens' log probabilities: from an engine's columns to values, a token each.

An engine names others at a place in one list, the likeliest first, then those that were asked
for by name. It does not know in which dialect they are sent.
"""

from collections.abc import Sequence

from msgspec import Struct

from drumline.client.stream import Delta

Other = tuple[int, float]
"""A token that stands nowhere, and its log probability."""


class TokenLogprob(Struct, frozen=True):
    """A token with its log probability, and others at its place: the likeliest, and by name."""

    token_id: int
    logprob: float
    top: tuple[Other, ...] = ()
    named: tuple[Other, ...] = ()


_Others = tuple[tuple[Other, ...], tuple[Other, ...]]
_NO_OTHERS: _Others = ((), ())


def of_answer(delta: Delta, taken: int, most: int | None, named: int) -> tuple[TokenLogprob, ...]:
    """Return what a delta tells of its first `taken` tokens; nothing where `most` is None.

    At each place there are `most` of the likeliest at the most, and `named` by name.
    """
    if most is None or len(delta.logprobs) != len(delta.token_ids):
        return ()
    others = _others(delta.top_logprob_ids, delta.top_logprobs, most, named)
    others += [_NO_OTHERS] * (taken - len(others))
    own = zip(delta.token_ids[:taken], delta.logprobs, others, strict=False)
    return tuple(TokenLogprob(id_, value, *beside) for id_, value, beside in own)


def of_prompt(delta: Delta, most: int, named: int) -> tuple[TokenLogprob | None, ...]:
    """Return what a delta tells of a prompt's tokens; None of the first, which follows nothing."""
    values, ids = delta.input_logprobs, delta.input_logprob_ids
    others = _others(delta.input_top_logprob_ids, delta.input_top_logprobs, most, named)
    others += [_NO_OTHERS] * (len(ids) - len(others))
    return tuple(
        None if value is None else TokenLogprob(id_, value, *beside)
        for id_, value, beside in zip(ids, values, others, strict=False)
    )


def _others(
    ids: Sequence[list[int] | None], values: Sequence[list[float] | None], most: int, named: int
) -> list[_Others]:
    """Return the likeliest tokens at each place, and the `named`, which are its last."""
    others = []
    for each, told in zip(ids, values, strict=False):
        pairs = tuple(zip(each or (), told or (), strict=False))
        likely = len(pairs) - named
        others.append((pairs[: min(most, likely)], pairs[likely:]) if pairs else _NO_OTHERS)
    return others
