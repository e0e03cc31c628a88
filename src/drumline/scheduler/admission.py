"""Planning prompts: which request gets a row, from which cached prefix, in which chunks.

Requests are looked at in the order of their line. Only one prompt may be unfinished:
the request that has it goes first, and nobody is admitted behind it in that round. A
request whose first chunk does not fit is passed over; later, smaller ones may go
before it, until it has been passed over too often.

Where groups that keep all have a prompt cached further than windows and state groups, the
end of that is promoted: these are cached there too, for the next request. As what is
carried is there only behind a forward, a chunk stops at it for a state group's sake.
"""

from enum import IntEnum

import numpy as np

from drumline.core.config import Role
from drumline.core.errors import InvariantError
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.chunk import Chunk
from drumline.scheduler.config import PREPAID_TOKENS, SchedulerConfig
from drumline.scheduler.draft import Draft
from drumline.scheduler.index import ZERO, IndexArray
from drumline.scheduler.lifecycle import Move, State
from drumline.scheduler.line import Line
from drumline.scheduler.loads import Loads
from drumline.scheduler.match import NO_MATCH, Match
from drumline.scheduler.matching import Matcher
from drumline.scheduler.publication import Publication
from drumline.scheduler.receiving import Receiving
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.rows import Rows
from drumline.scheduler.states import StateSlots
from drumline.scheduler.storage.tier import StorageTier
from drumline.scheduler.tables import BlockTables


class Verdict(IntEnum):
    """What became of a waiting request in a round."""

    ADMITTED = 0
    NO_ROOM = 1
    PREFIX_PENDING = 2
    """Another request is computing the prefix that this one needs."""
    FETCH_PENDING = 3
    """Storage is fetching the prefix that this one needs for another one."""


class Admission:
    """The waiting requests, and the one whose prompt is unfinished."""

    __slots__ = (
        "_caching",
        "_config",
        "_epoch",
        "_fresh",
        "_loads",
        "_matcher",
        "_open",
        "_pool",
        "_publication",
        "_receiving",
        "_requests",
        "_rows",
        "_sends",
        "_settled",
        "_sharing",
        "_states",
        "_storage",
        "_tables",
        "line",
        "verdicts",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        requests: RequestTable,
        rows: Rows,
        pool: BlockPool,
        tables: BlockTables,
        states: StateSlots,
        matcher: Matcher,
        publication: Publication,
        loads: Loads,
        storage: StorageTier | None,
        receiving: Receiving | None,
    ) -> None:
        self._storage = storage
        self._config = config
        self._caching = config.prefix_caching
        # What others send costs nothing to have twice, and is not waited for.
        self._sharing = (
            config.prefix_caching and config.share_in_flight and config.role is not Role.DECODE
        )
        self._sends = config.role is Role.PREFILL
        self._receiving = receiving
        self._requests = requests
        self._rows = rows
        self._pool = pool
        self._tables = tables
        self._states = states
        self._matcher = matcher
        self._loads = loads
        self._publication = publication
        self.line = Line(priorities=config.priorities, patience=config.patience)
        self._open: Request | None = None
        self._fresh: list[Request] = []
        self._epoch = 0
        self._settled = -1
        self.verdicts: dict[str, Verdict] = {}
        """Why a waiting request was passed over when it was last looked at."""

    def add(self, request: Request) -> None:
        """Line up a submitted request; one that bootstraps stands aside."""
        if request.state is State.BOOTSTRAPPING:
            self.line.add_aside(request)
        else:
            self.line.add(request)
            self._settled = -1

    def set_aside(self, request: Request) -> None:
        """Leave a waiting request out until it is brought back."""
        self.line.set_aside(request)
        self.verdicts.pop(request.rid, None)

    def bring_back(self, request: Request) -> None:
        """Look at a request again that was set aside, in its turn."""
        self.line.bring_back(request)
        self._settled = -1

    def leave(self, request: Request) -> None:
        """Forget a request that ended."""
        if request in self.line:
            self.line.remove(request)
            self.verdicts.pop(request.rid, None)
        if self._open is request:
            self._open = None
        if self._sharing:
            self._publication.withdraw(request)

    @property
    def unfinished(self) -> Request | None:
        """The request whose prompt is planned in part."""
        return self._open

    def match(self, request: Request) -> Match | None:
        """Return what is cached of a waiting request's prompt now, None where nothing ever is."""
        return self._matcher.match(request, self._cap(request)) if self._caching else None

    def settle(self, draft: Draft) -> None:
        """Publish, where prefixes are shared in flight, what the plan before this one computes."""
        for request in self._fresh:
            if request.state not in (State.FINISHED, State.RETIRING):
                # A peer may read the blocks of what is sent: they stay the row's.
                adopting = None if self._sends else draft
                self._publication.publish_prompt(request, request.planned, adopting)
        self._fresh.clear()

    def plan(self, draft: Draft, budget: int) -> list[Chunk]:
        """Plan prompt chunks of at most `budget` tokens in all."""
        chunks: list[Chunk] = []
        if self._open is not None:
            chunk = self._next_chunk(self._open, budget, draft)
            if chunk is None:
                return chunks
            chunks.append(chunk)
            budget -= chunk.tokens
        # Whoever was suspended comes back before anybody new is admitted.
        suspended = self._requests.counts[State.RETRACTED]
        if self._open is None and budget > 0 and self.line and not suspended:
            self._admit_waiting(chunks, budget, draft)
        return chunks

    def _admit_waiting(self, chunks: list[Chunk], budget: int, draft: Draft) -> None:
        if not self._rows.free or self._settled == self._pool.releases:
            return
        admitted: list[Request] = []
        pending = False
        complete = True
        for request in self.line:
            if budget <= 0 or not self._rows.free or self._open is not None:
                complete = False
                break
            if self._receiving is None:
                outcome = self._admit(request, budget, draft)
            else:
                outcome = self._receive(self._receiving, request, draft)
            if isinstance(outcome, Chunk):
                admitted.append(request)
                chunks.append(outcome)
                budget -= outcome.tokens
            elif outcome is Verdict.ADMITTED:
                admitted.append(request)
            else:
                self.verdicts[request.rid] = outcome
                pending = pending or outcome is not Verdict.NO_ROOM
                if outcome is Verdict.NO_ROOM and self.line.aged(request):
                    break
        for request in admitted:
            self.line.remove(request)
            self.verdicts.pop(request.rid, None)
        if admitted and self.line:
            self.line.passed_by(admitted)
        # Whoever is left did not fit, and will not until something is released.
        if complete and not pending:
            self._settled = self._pool.releases

    # -- one request --------------------------------------------------------------

    def _receive(self, receiving: Receiving, request: Request, draft: Draft) -> Verdict:
        """Have a prompt sent here as a whole."""
        targets = self._targets(request, request.prompt_tokens)
        if not receiving.admit(request, targets, draft):
            return Verdict.NO_ROOM
        self._begin_answer(request)
        return Verdict.ADMITTED

    def _admit(self, request: Request, budget: int, draft: Draft) -> Chunk | Verdict:
        match = NO_MATCH
        if self._caching:
            match = self._matcher.match(request, self._cap(request))
        if self._pending(request, match):
            return Verdict.PREFIX_PENDING
        if (
            self._storage is not None
            and match.pages < len(request.digests)
            and self._storage.holds_up(request, request.digests[match.pages])
        ):
            return Verdict.FETCH_PENDING
        targets = self._hold(request, match, budget)
        if targets is None and match.tails:
            # A tail takes room twice, shared and copied: that may be what does not fit.
            match = self._matcher.match(request, self._cap(request), tails=False)
            targets = self._hold(request, match, budget)
        if targets is None:
            return Verdict.NO_ROOM
        tokens = self._chunk_tokens(request, match.tokens, budget)
        self._epoch += 1
        request.epoch = self._epoch
        row = request.row = self._rows.take(request)
        request.cached_tokens = request.planned = match.tokens
        request.published = match.pages
        draft.bind(row, self._rows.generation_of[row], request.rid)
        if match.host:
            self._publication.name_loaded(request, match.pages)
            self._loads.place(match, request.digests)
        self._tables.open(row, match, targets, draft)
        if self._states:
            self._open_states(row, match, draft)
        for blocks in match.tails:  # held only until the copies had their targets
            self._pool.release(blocks[blocks > 0], self._epoch)
        if match.host or match.host_tails:
            self._load(request, match, draft)
        if self._sharing:
            self._publication.promise(request)
        return self._feed(request, tokens)

    def _hold(self, request: Request, match: Match, budget: int) -> list[int] | None:
        """Hold a match's blocks, and have room for what comes behind it.

        Returns the tokens that each group then has room for; None, and nothing happened,
        when there is no room.
        """
        far = self._far(match)
        request.promotion = far if far > match.tokens else 0
        tokens = self._chunk_tokens(request, match.tokens, budget)
        targets = self._targets(request, match.tokens + tokens)
        held = [part[part > ZERO] for part in (*match.blocks, *match.tails)]
        for blocks in held:
            self._pool.hold(blocks)
        needs = self._tables.needs(targets, match.tokens, match.pages)
        if self._states:
            needs += self._states.needs(self._carried(match))
        if match.host or match.host_tails:
            # Making room may send pages to the host tier, where these must not make theirs.
            self._loads.hold(match)
        if match.host:
            needs = [need + load for need, load in zip(needs, match.loads, strict=True)]
        if self._pool.make_room(needs):
            return targets
        for blocks in held:
            self._pool.release(blocks)
        if match.host or match.host_tails:
            self._loads.let_go(match)
        return None

    def _carried(self, match: Match) -> list[int]:
        """Return what state groups have at a match, 0 where it must be loaded for the row alone.

        What is loaded to be cached as well counts as there.
        """
        if match.tails:
            return match.carried(len(self._tables.table))
        return [1] * len(self._states) if match.pages else []

    def _open_states(self, row: int, match: Match, draft: Draft) -> None:
        found = match.carried(len(self._tables.table))
        if match.tails:
            # Unlike what is copied, the row goes on to read these.
            self._pool.hold(np.array([block for block in found if block], np.intp))
        self._states.open(row, found, draft)

    def _load(self, request: Request, match: Match, draft: Draft) -> None:
        """Have what the host tier has of a match copied, a tail to the row's own blocks."""
        row, size = request.row, self._config.prefix_granularity
        request.host_tokens = match.host_pages * size
        tail: list[IndexArray] = []
        if match.host_tails:
            request.host_tokens += match.tokens - match.pages * size
            for group, table in enumerate(self._tables.table):
                first, last = self._tables.partial(group, match.tokens)
                tail.append(table[row, first:last])
            tail += [np.array([block]) for block in self._states.read(row)]
        self._loads.load(match, tail, request.digests, request.sequence, draft)

    def _chunk_tokens(self, request: Request, start: int, budget: int) -> int:
        """Return how many of a prompt's tokens behind the first `start` its next chunk has."""
        end = min(start + budget, request.prompt_tokens)
        if self._states and start < request.promotion < end:
            end = request.promotion
        return end - start

    def _cap(self, request: Request) -> int:
        """Prompt tokens that may come from the cache: the last ones never do."""
        return request.cacheable_tokens(self._config.prefix_replay_tokens)

    def _pending(self, request: Request, match: Match) -> bool:
        """Whether somebody else is computing more of the prompt's prefix.

        That is its next page, or what windows and state groups lack of a page that is cached.
        """
        if not self._sharing or not self._publication.promising:
            return False
        far, size = self._far(match), self._config.prefix_granularity
        if far > match.tokens and self._publication.promoted(request.digests[far // size - 1]):
            return True
        # What state groups carry is not there behind every page that the others have.
        page = far // size if self._states and far > match.tokens else match.pages
        end = (page + 1) * size
        return end <= self._cap(request) and self._publication.promised(request.digests[page])

    def _far(self, match: Match) -> int:
        """Return how far a match would get if nobody lacked what others could promote."""
        return match.reach if self._config.promote_windows else match.paged

    def _targets(self, request: Request, planned: int) -> list[int]:
        """Return the tokens each group is to have room for once `planned` are planned.

        A declared budget is reserved by the groups that keep it; windows slide over it.
        """
        if self._sends:
            return [planned] * len(self._tables.windows)
        last = planned == request.prompt_tokens
        needed = planned + self._config.decode_tokens if last else planned
        prepaid = needed
        if request.max_new_tokens:
            prepaid = request.prompt_tokens + min(request.max_new_tokens, PREPAID_TOKENS)
        return [prepaid if window is None else needed for window in self._tables.windows]

    def _next_chunk(self, request: Request, budget: int, draft: Draft) -> Chunk | None:
        if budget <= 0:
            return None
        tokens = self._chunk_tokens(request, request.planned, budget)
        if self._caching:
            adopting = None if self._sends else draft
            self._publication.publish_prompt(request, request.planned, adopting)
        self._tables.lines.expire(np.array([request.row]), draft)
        targets = self._targets(request, request.planned + tokens)
        if not self._tables.grow(request.row, targets, draft, self._states.next_needs):
            return None
        self._states.advance(request.row, draft)
        return self._feed(request, tokens)

    def _feed(self, request: Request, tokens: int) -> Chunk:
        """Plan the next `tokens` tokens of a prompt whose row has the room."""
        rows, row, start = self._rows, request.row, request.planned
        request.planned = start + tokens
        rows.computed[row] = request.planned
        if request.planned < request.prompt_tokens:
            self._requests.move(request, Move.CHUNK)
            rows.silent[row] += 1
            rows.quiet += 1
            self._open = request
            if self._sharing:
                self._fresh.append(request)
        else:
            self._requests.move(
                request, Move.LAST_CHUNK_TO_SEND if self._sends else Move.LAST_CHUNK
            )
            self._open = None
            rows.outstanding[row] += 1
            self._begin_answer(request)
            if self._sharing or (self._sends and self._caching):
                self._fresh.append(request)
        return Chunk(request, start, tokens)

    def _begin_answer(self, request: Request) -> None:
        """Set the row's fields up for what follows the prompt."""
        size = self._config.prefix_granularity if self._caching else 0
        self._rows.begin_answer(request.row, size)

    def check(self) -> None:
        """Raise InvariantError unless exactly the submitted requests wait."""
        ready: set[str] = set()
        aside: set[str] = set()
        for request in self._requests.values():
            if request.state is State.SUBMITTED:
                ready.add(request.rid)
            elif request.state in (State.PREFETCHING, State.BOOTSTRAPPING):
                aside.add(request.rid)
        self.line.check(ready, aside)
        if self._open is not None and self._open.state is not State.PREFILLING:
            raise InvariantError(f"{self._open!r} is taken for an unfinished prompt")
        if self._requests.counts[State.PREFILLING] != (self._open is not None):
            raise InvariantError("more than one prompt is unfinished")
