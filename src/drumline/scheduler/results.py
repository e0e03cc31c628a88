"""Committing forward results: tokens of many rows at once, ragged."""

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.events import IllegalTransitionError, Results
from drumline.scheduler.index import ONE, ZERO, IndexArray
from drumline.scheduler.lifecycle import State
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.roster import Roster
from drumline.scheduler.rows import Rows


class Commits:
    """Writes results into the rows."""

    __slots__ = ("_hashing", "_newest", "_requests", "_roster", "_rows", "_width")

    def __init__(
        self,
        config: SchedulerConfig,
        requests: RequestTable,
        rows: Rows,
        roster: Roster,
    ) -> None:
        self._requests = requests
        self._rows = rows
        self._roster = roster
        self._width = config.decode_tokens
        self._hashing = config.prefix_caching
        self._newest = rows.newest.reshape(-1)

    def apply(self, results: Results) -> list[Request]:
        """Write `results`; returns the finishing requests that owe nothing any more.

        Raises IllegalTransitionError, before anything changed, when a row gets tokens
        that no planned forward owes it.
        """
        fields = self._rows
        counts, tokens = results.counts, results.tokens
        if self._roster.current(results.rows):
            rows = self._roster.index
        else:
            rows = results.rows.astype(np.intp)
            valid = fields.generation[rows] == results.generations
            if np.count_nonzero(valid) != len(valid):
                tokens = tokens[np.repeat(valid, counts)]
                rows, counts = rows[valid], counts[valid]
        quiet: IndexArray | None = None
        if fields.quiet:
            silent = fields.silent[rows] > 0
            if counts[silent].any():
                raise self._illegal(rows[silent & (counts > 0)])
            quiet = rows[silent]
            rows, counts = rows[~silent], counts[~silent]
        outstanding = fields.outstanding[rows] - ONE
        if np.count_nonzero(outstanding < ZERO):
            raise self._illegal(rows[outstanding < 0])
        if quiet is not None:
            fields.silent[quiet] -= 1
            fields.quiet -= len(quiet)
        fields.outstanding[rows] = outstanding
        self._write(rows, counts, tokens)
        if self._requests.counts[State.FINISHING]:
            return self._drained(rows, outstanding)
        return []

    def _write(self, rows: IndexArray, counts: IntArray, tokens: IntArray) -> None:
        fields = self._rows
        known = fields.known[rows]
        # As many tokens as rows, and no row without: one each, and none had drafts.
        if self._width == 1 and len(tokens) == len(rows) and np.count_nonzero(counts) == len(rows):
            fields.known[rows] = known + ONE
            if self._hashing:
                self._newest[fields.origin[rows] + known] = tokens
            return
        fields.known[rows] = known + counts
        # What is in flight was planned as if every draft would be accepted.
        fields.computed[rows] = known + counts - 1 + fields.outstanding[rows] * self._width
        if self._hashing:
            first = np.repeat(np.cumsum(counts) - counts, counts)
            at = np.repeat(fields.origin[rows] + known, counts) + np.arange(len(tokens)) - first
            self._newest[at] = tokens

    def _drained(self, rows: IndexArray, outstanding: IndexArray) -> list[Request]:
        owners = self._rows.owners
        return [
            owner
            for row in rows[outstanding == 0].tolist()
            if (owner := owners[row]) is not None and owner.state is State.FINISHING
        ]

    def _illegal(self, rows: IndexArray) -> IllegalTransitionError:
        owners = [self._rows.owners[row] for row in rows.tolist()]
        return IllegalTransitionError(f"results that no planned forward owes: {owners}")
