"""Committing forward results: tokens of many rows at once, ragged."""

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.events import IllegalTransitionError, Results
from drumline.scheduler.index import ONE, ZERO, IndexArray, some
from drumline.scheduler.lifecycle import State
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.roster import Roster
from drumline.scheduler.rows import Rows


class Commits:
    """Writes results into the rows."""

    __slots__ = ("_frames", "_hashing", "_naming", "_requests", "_roster", "_rows", "_width")

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
        self._naming = config.stages > 1
        self._frames = rows.frames.reshape(-1)

    def apply(self, results: Results) -> list[Request]:
        """Write `results`; returns the finishing requests that owe nothing any more.

        Raises IllegalTransitionError, before anything changed, when a row gets tokens
        that no planned forward owes it.
        """
        fields, roster = self._rows, self._roster
        counts, tokens = results.counts, results.tokens
        if roster.current(results.rows) and not fields.quiet:
            index, owed = roster.index, roster.ones
            outstanding = fields.outstanding
            np.subtract(outstanding, owed, outstanding)
            if some(outstanding < ZERO):
                unowed = np.flatnonzero(outstanding < ZERO)
                outstanding += owed
                raise self._illegal(unowed)
            # As many tokens as rows, and no row without: one each, and none had drafts.
            if self._width == 1 and len(tokens) == len(index) == np.count_nonzero(counts):
                fields.known += owed
                if self._naming:
                    fields.last[index] = tokens
                if self._hashing:
                    self._frames[fields.cursor[index]] = tokens
                    fields.cursor += owed
            else:
                self._write(index, counts, tokens)
        else:
            index, counts, tokens = self._valid(results)
            index, counts = self._owed(index, counts)
            self._write(index, counts, tokens)
        if self._requests.counts[State.FINISHING]:
            return self._drained(index)
        return []

    def _valid(self, results: Results) -> tuple[IndexArray, IntArray, IntArray]:
        """Return rows, counts and tokens of the results whose request still has its row."""
        rows, counts, tokens = results.rows.astype(np.intp), results.counts, results.tokens
        valid = self._rows.generation[rows] == results.generations
        if np.count_nonzero(valid) == len(valid):
            return rows, counts, tokens
        return rows[valid], counts[valid], tokens[np.repeat(valid, counts)]

    def _owed(self, rows: IndexArray, counts: IntArray) -> tuple[IndexArray, IntArray]:
        """Count off what was owed, and return the rows that may have got tokens."""
        fields = self._rows
        quiet: IndexArray | None = None
        if fields.quiet:
            silent = fields.silent[rows] > 0
            if counts[silent].any():
                raise self._illegal(rows[silent & (counts > 0)])
            quiet = rows[silent]
            rows, counts = rows[~silent], counts[~silent]
        outstanding = fields.outstanding[rows] - ONE
        if some(outstanding < ZERO):
            raise self._illegal(rows[outstanding < 0])
        if quiet is not None:
            fields.silent[quiet] -= 1
            fields.quiet -= len(quiet)
        fields.outstanding[rows] = outstanding
        return rows, counts

    def _write(self, rows: IndexArray, counts: IntArray, tokens: IntArray) -> None:
        """Append `counts[i]` of the tokens to what is known of `rows[i]`."""
        fields = self._rows
        known = fields.known[rows] + counts
        fields.known[rows] = known
        if self._naming:
            ends = np.cumsum(counts)
            fields.last[rows[counts > 0]] = tokens[ends[counts > 0] - 1]
        # What is in flight was planned as if every draft would be accepted.
        fields.computed[rows] = known - 1 + fields.outstanding[rows] * self._width
        if self._hashing:
            cursor = fields.cursor[rows]
            first = np.repeat(cursor + counts - np.cumsum(counts), counts)
            self._frames[first + np.arange(len(tokens))] = tokens
            fields.cursor[rows] = cursor + counts

    def _drained(self, rows: IndexArray) -> list[Request]:
        owners = self._rows.owners
        outstanding = self._rows.outstanding[rows]
        return [
            owner
            for row in rows[outstanding == 0].tolist()
            if (owner := owners[row]) is not None and owner.state is State.FINISHING
        ]

    def _illegal(self, rows: IndexArray) -> IllegalTransitionError:
        owners = [self._rows.owners[row] for row in rows.tolist()]
        return IllegalTransitionError(f"results that no planned forward owes: {owners}")
