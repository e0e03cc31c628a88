"""Planning decodes: who decodes in this round, with room for what it writes.

A steady round touches the rows that decode as whole arrays; only rows that the
agenda names, because a block fills up or a page completes, are looked at one by one.
"""

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from drumline.contract.arrays import IntArray
from drumline.contract.plan import AbortReason
from drumline.core.errors import InvariantError
from drumline.scheduler.agenda import Agenda
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.draft import Draft
from drumline.scheduler.lifecycle import Move, State
from drumline.scheduler.publication import Publication
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.roster import Roster
from drumline.scheduler.rows import Rows
from drumline.scheduler.tables import BlockTables


class Decodes(Struct, frozen=True, eq=False):
    """The decode rows of a batch."""

    rows: IntArray
    generations: IntArray
    input_lengths: IntArray
    prefix_lengths: IntArray


class Decoding:
    """The rows that decode, and when each needs attention."""

    __slots__ = (
        "_agenda",
        "_caching",
        "_due",
        "_end",
        "_granularity",
        "_publication",
        "_ready",
        "_requests",
        "_rows",
        "_tables",
        "_width",
        "roster",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        requests: RequestTable,
        rows: Rows,
        tables: BlockTables,
        publication: Publication,
        end: Callable[[Request, Move], None],
    ) -> None:
        self._width = config.decode_tokens
        self._granularity = config.prefix_granularity
        self._caching = config.prefix_caching
        self._requests = requests
        self._rows = rows
        self._tables = tables
        self._publication = publication
        self._end = end
        self._agenda = Agenda(rows.generation)
        self.roster = Roster(rows.sequence, rows.generation, config.decode_tokens)
        self._ready: list[Request] = []
        self._due: list[IntArray] = []

    def add(self, request: Request) -> None:
        """Take over a request whose whole prompt is planned."""
        self._ready.append(request)

    @property
    def size(self) -> int:
        """Rows that want to decode."""
        return len(self.roster) + len(self._ready)

    def leave(self, request: Request) -> None:
        """Forget a request that ended."""
        if request.row in self.roster:
            self.roster.leave(request.row)
        elif request in self._ready:
            self._ready.remove(request)

    def settle(self, number: int) -> None:
        """Publish what rows due in this round have completed."""
        due = self._agenda.take(number)
        if len(due):
            self._due.append(due)
            if self._caching:
                self._publication.publish_decoded(due)

    def plan(self, draft: Draft, budget: int) -> Decodes | None:
        """Plan a decode of every row that has room, within `budget` tokens."""
        due = self._take_due()
        left_out = self._make_room(due, draft) if len(due) else _NOBODY
        roster = self.roster
        roster.refresh()
        rows = roster.rows
        generations, lengths = roster.generations, roster.lengths
        limit = budget // self._width
        if len(left_out) or len(rows) > limit:
            rows = rows[~np.isin(rows, left_out)][:limit]
            generations = self._rows.generation[rows]
            lengths = lengths[: len(rows)]
        prefix = self._rows.computed[rows]
        self._rows.computed[rows] = prefix + np.int32(self._width)
        self._rows.outstanding[rows] += 1
        if len(due):
            self._file(due, draft.round)
        if not len(rows):
            return None
        return Decodes(rows, generations, lengths, prefix)

    def _take_due(self) -> IntArray:
        due = self._due
        if self._ready:
            for request in self._ready:
                self._requests.move(request, Move.DECODE)
                self.roster.join(request.row)
            due.append(np.array([request.row for request in self._ready], np.int32))
            self._ready.clear()
        if not due:
            return _NOBODY
        # Rows of rounds that planned no decode wait here; a row may have ended since, and
        # its successor be here by itself.
        rows = {row for part in due for row in part.tolist() if row in self.roster}
        due.clear()
        return np.array(sorted(rows, key=self._rows.sequence.__getitem__), np.int32)

    def _make_room(self, due: IntArray, draft: Draft) -> IntArray:
        """Give due rows the blocks they need; returns those that must sit this round out."""
        fields = self._rows
        targets = fields.computed[due] + np.int32(self._width)
        short = targets > fields.room[due]
        if not short.any():
            return _NOBODY
        rows, targets = due[short], targets[short]
        if int(targets.max()) <= self._tables.max_tokens and self._tables.extend(
            rows, targets, draft
        ):
            return _NOBODY
        blocked = [
            row
            for row, target in zip(rows.tolist(), targets.tolist(), strict=True)
            if not self._grow(row, target, draft)
        ]
        while blocked and not self._requests.counts[State.FINISHING]:
            self._abort_newest(draft)
            blocked = [
                row
                for row in blocked
                if row in self.roster
                and not self._grow(row, int(fields.computed[row]) + self._width, draft)
            ]
        return np.array(blocked, np.int32)

    def _grow(self, row: int, tokens: int, draft: Draft) -> bool:
        if tokens <= self._tables.max_tokens:
            return self._tables.grow(row, tokens, draft)
        request = self._owner(row)
        draft.abort(
            request.rid,
            AbortReason.OUT_OF_PAGES,
            f"needs room for {tokens} tokens, a request may have {self._tables.max_tokens}",
        )
        self._end(request, Move.ABORT)
        return True

    def _abort_newest(self, draft: Draft) -> None:
        row = self.roster.newest()
        request = self._owner(row)
        draft.abort(
            request.rid,
            AbortReason.OUT_OF_PAGES,
            f"no free page for a decode and nothing will free one; this request, the newest of "
            f"{len(self.roster)} that decode, held {int(self._rows.room[row])} tokens of room",
        )
        self._end(request, Move.ABORT)

    def _owner(self, row: int) -> Request:
        owner = self._rows.owners[row]
        if owner is None:
            raise InvariantError(f"row {row} decodes and has no owner")
        return owner

    def _file(self, due: IntArray, number: int) -> None:
        """File `due` under the first round in which each can need attention again."""
        fields, width = self._rows, self._width
        owned = [row for row in due.tolist() if row in self.roster]
        due = np.array(owned, np.int32)
        computed = fields.computed[due]
        wait = (fields.room[due] - computed) // width + 1
        if self._caching:
            page = -((computed - fields.hashed[due] - self._granularity) // width) + 1
            wait = np.minimum(wait, page)
        self._agenda.file(due, np.maximum(wait, 1).astype(np.int64) + number)

    def check(self) -> None:
        """Raise InvariantError unless every decoding row is filed for attention."""
        self.roster.check()
        waiting = {row for rows in self._due for row in rows.tolist()}
        filed = self._agenda.filed() | waiting
        for request in self._requests.values():
            decoding = request.state is State.DECODING
            if decoding != (request.row in self.roster and request.row > 0):
                raise InvariantError(f"{request!r} and the decode batch disagree")
            if decoding and request.row not in filed:
                raise InvariantError(f"{request!r} is never looked at again")


_NOBODY = np.empty(0, np.int32)
_NOBODY.flags.writeable = False
