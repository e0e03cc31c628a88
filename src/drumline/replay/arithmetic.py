"""A model made of integer arithmetic: what a token's cache entry holds, and what comes next.

A position's entry depends on the entry before it and on its token; the next token
depends on every entry so far. So a page that is wrong, stale, lost or somebody
else's changes the tokens that follow. It knows nothing of pages or batches.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Entries = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9


def entry(before: int, token: int) -> int:
    """Return the cache entry of `token` behind the entry `before`; 0 stands before the first."""
    mixed = ((before ^ (token + 1)) * _MIX + _STEP) & _MASK
    return mixed ^ (mixed >> 29)


def weights(count: int) -> Entries:
    """Return the weight of each of `count` positions in what a query sees."""
    return (np.arange(count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)) * np.uint64(_STEP)


def token_of(seen: int, seed: int, vocab_size: int) -> int:
    """Return the token that follows what a query saw."""
    mixed = ((seen ^ (seed * _STEP)) * _MIX) & _MASK
    return (mixed ^ (mixed >> 31)) % vocab_size


def answer(prompt: Sequence[int], seed: int, vocab_size: int) -> Iterator[int]:
    """Yield the tokens that follow a prompt, without end: what any schedule must produce."""
    seen = before = 0
    tokens = list(prompt)
    position = 0
    while True:
        for token in tokens:
            before = entry(before, token)
            seen = (seen + before * ((2 * position + 1) * _STEP & _MASK)) & _MASK
            position += 1
        tokens = [token_of(seen, seed, vocab_size)]
        yield tokens[0]
