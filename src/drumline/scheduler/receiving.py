"""A decode engine's prompts: blocks for what a prefill engine writes into them.

A prompt is admitted whole, with room for its answer, and costs the forward nothing. Of a
window group it gets the blocks that the first decode looks back on. What the device has
cached of it in full pages is not sent; the host tier is for images here, and the tail of a
prompt is not shared. Until the transfer is known to have ended, a peer may write to the
blocks, so nobody else gets them, whatever becomes of the request.
"""

from collections.abc import Callable, Sequence

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.contract.plan import RemotePrefill
from drumline.core.errors import InvariantError
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.draft import Draft
from drumline.scheduler.index import IndexArray
from drumline.scheduler.lifecycle import Move, State
from drumline.scheduler.match import NO_MATCH, Match
from drumline.scheduler.matching import Matcher
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.rows import Rows
from drumline.scheduler.states import StateSlots
from drumline.scheduler.tables import BlockTables
from drumline.scheduler.views import RowViews


class Receiving:
    """Prompts on their way here, and the tokens that came with those that arrived."""

    __slots__ = (
        "_epoch",
        "_hashing",
        "_match",
        "_pool",
        "_requests",
        "_rows",
        "_states",
        "_tables",
        "_tokens",
        "_views",
    )

    def __init__(
        self,
        requests: RequestTable,
        rows: Rows,
        pool: BlockPool,
        tables: BlockTables,
        states: StateSlots,
        matcher: Matcher | None,
        views: RowViews,
        *,
        replayed: int,
    ) -> None:
        """`matcher` is None where no prefix is cached."""
        self._requests = requests
        self._rows = rows
        self._pool = pool
        self._tables = tables
        self._states = states
        self._views = views
        self._epoch = 0
        self._hashing = matcher is not None
        self._match = _no_match if matcher is None else _matched(matcher, replayed)
        self._tokens: dict[str, int] = {}

    def admit(self, request: Request, targets: Sequence[int], draft: Draft) -> bool:
        """Give the request a row, and blocks for `targets[g]` tokens; False without room."""
        tokens, match = request.prompt_tokens, self._match(request)
        blocks = self._still_read(match, tokens)
        held = [part[part > 0] for part in blocks]
        for part in held:
            self._pool.hold(part)
        needs = self._tables.needs(targets, tokens, match.pages)
        if not self._pool.make_room(needs + self._states.needs([])):
            for part in held:
                self._pool.release(part)
            return False
        self._epoch += 1
        request.epoch = self._epoch
        row = request.row = self._rows.take(request)
        request.cached_tokens, request.planned = match.tokens, tokens
        request.published = match.pages
        self._rows.computed[row] = tokens
        draft.bind(row, int(self._rows.generation[row]), request.rid)
        self._tables.open(row, Match(match.pages, tokens, 0, 0, blocks, []), targets, draft)
        self._states.open(row, [], draft)
        self._requests.move(request, Move.RECEIVE)
        draft.remote_prefill(
            RemotePrefill(
                row=row,
                generation=int(self._rows.generation[row]),
                rid=request.rid,
                cached_tokens=match.tokens,
                prompt_tokens=tokens,
                tables=self._views.tables(row),
            )
        )
        return True

    def _still_read(self, match: Match, tokens: int) -> list[IndexArray]:
        """Return a match's blocks that a token at position `tokens` looks back on."""
        blocks = [part.copy() for part in match.blocks[: len(self._tables.table)]]
        for group, part in enumerate(blocks):
            part[: self._tables.first_column(group, tokens)] = 0
        return blocks

    # -- arrivals -----------------------------------------------------------------

    def arrive(self, request: Request, token: int) -> None:
        """Take the first token of a prompt whose cache is all here; it may decode now."""
        self._requests.move(request, Move.ARRIVE)
        self._rows.append(request.row, token, hashing=self._hashing)
        self._tokens[request.rid] = token

    def first_tokens(self, rows: IntArray) -> IntArray | None:
        """Return what decode rows feed, -1 where it was sampled here, None if all was."""
        if not self._tokens:
            return None
        owners = [self._rows.owners[row] for row in rows.tolist()]
        fed = [self._tokens.pop(owner.rid, -1) if owner else -1 for owner in owners]
        if max(fed, default=-1) < 0:
            return None
        ids = np.array(fed, np.int32)
        ids.flags.writeable = False
        return ids

    def leave(self, request: Request) -> None:
        """Forget a request that ended."""
        self._tokens.pop(request.rid, None)

    def check(self) -> None:
        """Raise InvariantError unless whoever has a first token is to decode, and has room."""
        for rid in self._tokens:
            request = self._requests.get(rid)
            if request is None or request.state in (State.RECEIVING, State.FINISHED):
                raise InvariantError(f"{rid} has a first token and does not decode")


def _no_match(_request: Request) -> Match:
    return NO_MATCH


def _matched(matcher: Matcher, replayed: int) -> Callable[[Request], Match]:
    return lambda request: matcher.match(
        request, request.cacheable_tokens(replayed), tails=False, host=False
    )
