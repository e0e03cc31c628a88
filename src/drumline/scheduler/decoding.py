"""Planning decodes: who decodes in this round, with room for what it writes.

A steady round touches the rows that decode as whole arrays; only rows that the
agenda names, because a block fills up or a page completes, are looked at one by one.
"""

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from drumline.contract.arrays import IntArray
from drumline.contract.plan import AbortReason
from drumline.core.config import Role
from drumline.core.errors import InvariantError
from drumline.scheduler.agenda import Agenda
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.draft import Draft
from drumline.scheduler.index import FEW, ZERO, IndexArray, every, scalar, some
from drumline.scheduler.lifecycle import Move, State
from drumline.scheduler.publication import Publication
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.roster import Roster
from drumline.scheduler.rows import Rows
from drumline.scheduler.states import StateSlots
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
        "_blocked",
        "_caching",
        "_decoded",
        "_end",
        "_held",
        "_page",
        "_page_tokens",
        "_publication",
        "_ready",
        "_requests",
        "_reserved",
        "_rows",
        "_sharing_tails",
        "_stages",
        "_states",
        "_step",
        "_tables",
        "_width",
        "_windows",
        "roster",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        requests: RequestTable,
        rows: Rows,
        tables: BlockTables,
        states: StateSlots,
        publication: Publication,
        end: Callable[[Request, Move], None],
    ) -> None:
        self._width = config.decode_tokens
        self._stages = config.stages
        self._decoded = np.zeros(config.max_rows + 1, np.intp)
        """The round of each row's last decode, where rows take turns."""
        self._step = scalar(config.decode_tokens)
        self._page = scalar(config.prefix_granularity)
        self._page_tokens = config.prefix_granularity
        self._caching = config.prefix_caching
        # A decode engine's prompts match in full pages alone.
        self._sharing_tails = config.role is Role.PLAIN
        self._windows = any(group.window_tokens is not None for group in config.groups)
        self._requests = requests
        self._rows = rows
        self._tables = tables
        self._states = states
        self._publication = publication
        self._end = end
        self._agenda = Agenda(len(rows.owners))
        self.roster = Roster(rows.sequence, rows.generation, config.decode_tokens)
        self._ready: list[Request] = []
        self._blocked: list[int] = []
        self._held: dict[int, Request] = {}
        self._reserved: dict[int, int] = {}
        """Tokens that the next decode of a row is to have room for, where they are more."""

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
            self._agenda.leave(request.row)
            self._held.pop(request.row, None)
            self._reserved.pop(request.row, None)
            if request.row in self._blocked:
                self._blocked.remove(request.row)
        elif request in self._ready:
            self._ready.remove(request)

    def plan(self, draft: Draft, budget: int) -> Decodes | None:
        """Plan a decode of every row that has room, within `budget` tokens."""
        roster, fields = self.roster, self._rows
        due = self._blocked + self._agenda.take(draft.round)
        together = np.array(due, np.intp) if len(due) > FEW else None
        if due and self._caching:
            self._publication.publish_decoded(due, together, draft)
        joining: dict[int, Request] = {}
        if self._ready:
            joining = self._join()
            due += joining
        members = len(roster)
        left_out = self._blocked = self._make_room(due, together, joining, draft)
        aborted = len(roster) < members
        if joining:
            together = None
        roster.refresh()
        rows, generations, lengths = roster.rows, roster.generations, roster.lengths
        index, ones, steps = roster.index, roster.ones, roster.steps
        limit = budget // self._width
        if left_out or self._held or len(rows) > limit or self._stages > 1:
            index = index[~np.isin(index, [*left_out, *self._held])]
            if self._stages > 1:
                index = self._in_turn(index, limit)
            index = index[:limit]
            rows, generations = index.astype(np.int32), fields.generation[index]
            lengths = lengths[: len(index)]
            ones = roster.marks(index)
            steps = ones * self._width
        prefix = fields.computed[index].astype(np.int32)
        fields.computed += steps
        fields.outstanding += ones
        if self._stages > 1:
            self._decoded[index] = draft.round
        if aborted or left_out:
            due = [row for row in due if row in roster and row not in left_out]
            together = None
        if due:
            self._file(due, together)
        if not len(rows):
            return None
        return Decodes(rows, generations, lengths, prefix)

    def _join(self) -> dict[int, Request]:
        """Take those that are ready into the batch, and return them by row."""
        waiting: list[Request] = []
        if self._stages > 1:
            outstanding = self._rows.outstanding
            waiting = [request for request in self._ready if outstanding[request.row]]
        joining = {request.row: request for request in self._ready if request not in waiting}
        self._ready = waiting
        for request in joining.values():
            self._requests.move(request, Move.DECODE)
            self.roster.join(request.row)
        return joining

    def _in_turn(self, index: IndexArray, limit: int) -> IndexArray:
        """Return those of `index` whose turn it is in a pipeline, in the same order.

        No result is under way for them, and they are at most `limit` and a stage's share of all
        rows, so that as many forwards as there are stages have rows. Who waited longest goes
        first.
        """
        index = index[self._rows.outstanding[index] == ZERO]
        share = min(limit, -(-len(self.roster) // self._stages))
        if len(index) <= share:
            return index
        longest = np.argsort(self._decoded[index], kind="stable")[:share]
        return index[np.sort(longest)]

    def _make_room(
        self,
        due: list[int],
        together: IndexArray | None,
        joining: dict[int, Request],
        draft: Draft,
    ) -> list[int]:
        """Give due rows the blocks they need, those in `together` with one another if they can be.

        Returns those that must sit this round out: the last submitted, where not all have room.
        """
        if (
            together is not None
            and self._before(together, joining)
            and self._make_room_together(together, draft)
        ):
            due = list(joining)
        blocked: list[int] = []
        if not due:
            return blocked
        for row in sorted(due, key=self._rows.sequence_of.__getitem__):
            if row in joining and self._caching:
                request = joining[row]
                self._publication.publish_prompt(request, request.prompt_tokens, draft)
                if self._sharing_tails:
                    self._publication.publish_tail(request, draft)
            if self._windows and self._tables.passed(row):
                self._tables.lines.expire(np.array([row]), draft)
            if not self._grow(row, draft):
                blocked.append(row)
        return blocked

    def _before(self, rows: IndexArray, joining: dict[int, Request]) -> bool:
        """Whether `rows` were submitted before all who join, and so have the first choice."""
        if not joining:
            return True
        first = min(request.sequence for request in joining.values())
        return every(self._rows.sequence[rows] < first)

    def _make_room_together(self, rows: IndexArray, draft: Draft) -> bool:
        """Give all of `rows` the blocks they need, or, returning False, none of them any."""
        if self._reserved or (self._states and self._states.restless(rows)):
            return False
        if self._windows:
            self._tables.lines.expire(rows, draft)
        return self._tables.lines.extend(rows, self._step, draft)

    def _grow(self, row: int, draft: Draft) -> bool:
        computed, limit = self._rows.computed_of[row], self._tables.max_tokens
        tokens = computed + self._width
        if tokens <= limit:
            tokens = min(max(tokens, computed + self._reserved.get(row, 0)), limit)
            targets, states = [tokens] * len(self._tables.windows), self._states
            if not self._tables.grow(row, targets, draft, states.decode_needs(row)):
                return False
            self._reserved.pop(row, None)
            if states:
                states.decode(row, draft)
            return True
        request = self._owner(row)
        draft.abort(
            request.rid,
            AbortReason.OUT_OF_PAGES,
            f"needs room for {tokens} tokens, a request may have {self._tables.max_tokens}",
        )
        self._end(request, Move.ABORT)
        return True

    # -- for whoever makes room ------------------------------------------------------

    @property
    def stuck(self) -> bool:
        """Rows wait for blocks, and no request that ended will give any back by itself."""
        if not self._blocked or self._requests.counts[State.FINISHING]:
            return False
        # A request whose result is under way may end with it.
        return not self._owed()

    def _owed(self) -> bool:
        """Whether rows wait for results without which they cannot be planned."""
        if self._stages == 1:
            return False
        self.roster.refresh()
        outstanding = self._rows.outstanding
        return some(outstanding[self.roster.index] > ZERO) or any(
            outstanding[request.row] for request in self._ready
        )

    def requests(self) -> list[Request]:
        """Return the decoding requests in order of submission."""
        self.roster.refresh()
        return [self._owner(row) for row in self.roster.index.tolist()]

    def newest(self) -> Request:
        """Return the decoding request submitted last."""
        return self._owner(self.roster.newest())

    def resume(self, request: Request) -> None:
        """Take over a request whose row was filled again."""
        self.roster.join(request.row)
        self._blocked.append(request.row)

    def reserve(self, request: Request, tokens: int) -> None:
        """Have the next decode of a decoding request find room for `tokens`."""
        row = request.row
        self._reserved[row] = tokens
        if row not in self._blocked:
            self._agenda.leave(row)
            self._blocked.append(row)

    def hold_back(self, request: Request) -> None:
        """Leave a request out of batches until it is let go."""
        self._held[request.row] = request

    def let_go(self, request: Request) -> None:
        self._held.pop(request.row, None)

    def held_back(self) -> list[Request]:
        return list(self._held.values())

    def _owner(self, row: int) -> Request:
        owner = self._rows.owners[row]
        if owner is None:
            raise InvariantError(f"row {row} decodes and has no owner")
        return owner

    def _file(self, due: list[int], together: IndexArray | None) -> None:
        """File `due` under the first round in which each can need attention again."""
        if len(due) <= FEW:
            self._agenda.file(due, [self._wait(row) for row in due])
            return
        rows = np.array(due, np.intp) if together is None else together
        until = self._tables.lines.lasts(rows)
        if self._caching:
            until = np.minimum(until, self._rows.hashed[rows] + self._page)
        wait = until - self._rows.computed[rows]
        if self._width > 1:
            wait //= self._step
        if self._states:
            # What the first decode read goes with the second.
            wait[self._states.reading(rows)] = 0
        self._agenda.file_many(rows, wait)

    def _wait(self, row: int) -> int:
        """Return the rounds, this one aside, in which `row` can need no attention.

        It is below 0 where tokens lag behind what was planned.
        """
        if self._states and self._states.holds_read(row):
            return 0
        until = self._tables.last(row)
        if self._caching:
            until = min(until, self._rows.hashed_of[row] + self._page_tokens)
        return (until - self._rows.computed_of[row]) // self._width

    def check(self) -> None:
        """Raise InvariantError unless every decoding row is filed for attention."""
        self.roster.check()
        filed = [*self._agenda.filed(), *self._blocked]
        if len(filed) != len(set(filed)):
            raise InvariantError("a row is filed twice")
        decoding = {
            request.row for request in self._requests.values() if request.state is State.DECODING
        }
        if any(row not in self.roster for row in decoding) or len(decoding) != len(self.roster):
            raise InvariantError("the decode batch is not that of the decoding requests")
        if decoding != set(filed):
            raise InvariantError("a decoding row is never looked at again, or another one is")
