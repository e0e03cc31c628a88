"""The tokens that requests have committed, for models that read tokens of before.

Such a model keeps a row of tokens for each pool row, to which each forward appends what it
feeds. What it was not fed there, a row's new owner must be given before its first forward:
a prefix that was cached, or all that a suspended request had read and said. Owners are told
apart by the generation of a row, never by a request's id.

It knows rows and tokens, and nothing of how requests end.
"""

from collections.abc import Iterable

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.contract.plan import Batch, Bound
from drumline.contract.ports import HistorySeeds
from drumline.contract.result import ForwardResult
from drumline.contract.specs import HistoryNeed
from drumline.core.errors import InvariantError


class HistoryRows:
    """Committed tokens by pool row, and of requests that have none."""

    __slots__ = ("_by_rid", "_generation", "_lengths", "_lookback", "_rows", "_seeded", "_tokens")

    def __init__(self, need: HistoryNeed, max_rows: int, context_tokens: int) -> None:
        self._lookback = need.lookback
        self._by_rid: dict[str, IntArray] = {}
        """The tokens of admitted requests; of those that have a row, as of when they got it."""
        self._rows: dict[str, int] = {}
        self._tokens = np.zeros((max_rows + 1, context_tokens + 1), np.int32)
        self._lengths = np.zeros(max_rows + 1, np.int32)
        self._generation = np.full(max_rows + 1, -1, np.int32)
        self._seeded = np.full(max_rows + 1, -1, np.int32)
        """The generation that a row's history on the device belongs to."""

    def admit(self, rid: str, prompt: IntArray) -> None:
        """Learn a request that the scheduler is given."""
        self._by_rid[rid] = prompt

    def bind(self, bound: Bound) -> None:
        """Note that a row serves a request from this round's plan on."""
        tokens = self._by_rid.get(bound.rid)
        if tokens is None:
            return  # it ended in this round
        self._rows[bound.rid] = bound.row
        self._generation[bound.row] = bound.generation
        self._lengths[bound.row] = len(tokens)
        self._tokens[bound.row, : len(tokens)] = tokens

    def suspend(self, rid: str) -> None:
        """Keep the tokens of a request that loses its row; all its results have come."""
        row = self._rows.pop(rid, None)
        if row is not None:
            self._by_rid[rid] = self._tokens[row, : self._lengths[row]].copy()
            self._generation[row] = -1

    def forget(self, rids: Iterable[str]) -> None:
        """Forget requests that ended."""
        for rid in rids:
            self._by_rid.pop(rid, None)
            row = self._rows.pop(rid, None)
            if row is not None:
                self._generation[row] = -1

    def commit(self, batch: Batch, result: ForwardResult) -> None:
        """Take a forward's tokens, which follow what its rows fed."""
        live = self._generation[batch.rows] == batch.generations
        counts = np.where(live, result.counts, 0)
        ends = batch.prefix_lengths + batch.input_lengths
        index = np.repeat(np.arange(batch.size), result.counts)
        places = np.arange(len(index)) - np.repeat(
            np.cumsum(result.counts) - result.counts, result.counts
        )
        kept = live[index]
        rows = batch.rows[index][kept]
        self._tokens[rows, (ends[index] + places)[kept]] = result.tokens[kept]
        grown = counts > 0
        self._lengths[batch.rows[grown]] = (ends + counts)[grown]

    def seeds(self, batch: Batch) -> HistorySeeds | None:
        """Return what rows with a new owner have cached before this forward, each once."""
        fresh = np.flatnonzero(self._seeded[batch.rows] != batch.generations)
        if not len(fresh):
            return None
        rows, prefixes = batch.rows[fresh], batch.prefix_lengths[fresh]
        self._seeded[rows] = batch.generations[fresh]
        back = prefixes if self._lookback is None else np.minimum(prefixes, self._lookback)
        starts = prefixes - back
        if (prefixes > self._lengths[rows]).any():
            raise InvariantError(f"rows {rows.tolist()} have more cached than was committed")
        tokens = [
            self._tokens[row, start:end]
            for row, start, end in zip(rows, starts, prefixes, strict=True)
        ]
        return HistorySeeds(rows, starts, prefixes, np.concatenate(tokens))
