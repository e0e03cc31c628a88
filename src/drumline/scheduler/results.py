"""Committing forward results: tokens of many rows at once, ragged."""

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.scheduler.events import IllegalTransitionError, Results
from drumline.scheduler.lifecycle import State
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.rows import Rows


class Commits:
    """Writes results into the rows."""

    __slots__ = ("_requests", "_rows", "_width")

    def __init__(self, requests: RequestTable, rows: Rows, decode_tokens: int) -> None:
        self._requests = requests
        self._rows = rows
        self._width = decode_tokens

    def apply(self, results: Results) -> list[Request]:
        """Write `results`; returns the finishing requests that owe nothing any more.

        Raises IllegalTransitionError, before anything changed, when a row gets tokens
        that no planned forward owes it.
        """
        fields = self._rows
        rows, counts, tokens = results.rows, results.counts, results.tokens
        valid = fields.generation[rows] == results.generations
        if not valid.all():
            tokens = tokens[np.repeat(valid, counts)]
            rows, counts = rows[valid], counts[valid]
        silent = fields.silent[rows] > 0
        if silent.any():
            if counts[silent].any():
                raise self._illegal(rows[silent & (counts > 0)])
            quiet = rows[silent]
            rows, counts = rows[~silent], counts[~silent]
        else:
            quiet = None
        outstanding = fields.outstanding[rows] - np.int32(1)
        if len(rows) and int(outstanding.min()) < 0:
            raise self._illegal(rows[outstanding < 0])
        if quiet is not None:
            fields.silent[quiet] -= 1
        fields.outstanding[rows] = outstanding
        self._write(rows, counts, tokens)
        if self._requests.counts[State.FINISHING]:
            return self._drained(rows, outstanding)
        return []

    def _write(self, rows: IntArray, counts: IntArray, tokens: IntArray) -> None:
        fields = self._rows
        known = fields.known[rows]
        recent = fields.recent
        width = recent.shape[1]
        if len(tokens) == len(rows) and (counts == 1).all():
            recent[rows, known % width] = tokens
        else:
            first = np.repeat(np.cumsum(counts) - counts, counts)
            at = np.repeat(known, counts) + np.arange(len(tokens)) - first
            recent[np.repeat(rows, counts), at % width] = tokens
            # What is in flight was planned as if every draft would be accepted.
            ahead = fields.outstanding[rows] * np.int32(self._width)
            fields.computed[rows] = known + counts - np.int32(1) + ahead
        fields.known[rows] = known + counts

    def _drained(self, rows: IntArray, outstanding: IntArray) -> list[Request]:
        owners = self._rows.owners
        return [
            owner
            for row in rows[outstanding == 0].tolist()
            if (owner := owners[row]) is not None and owner.state is State.FINISHING
        ]

    def _illegal(self, rows: IntArray) -> IllegalTransitionError:
        owners = [self._rows.owners[row] for row in rows.tolist()]
        return IllegalTransitionError(f"results that no planned forward owes: {owners}")
