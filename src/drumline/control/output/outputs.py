"""Commits forwards: who produced what, who is over, and what its client is told.

Owns every live request, by id; `seats` has them by pool row. Python runs per request only
for rows that start, end or need it. It returns the scheduler's events, the frontend's columns
and the ids to release, all at once when the round asks for them, and knows neither of their
takers.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from drumline.contract.arrays import IntArray
from drumline.contract.outputs import OutputColumns
from drumline.contract.plan import Batch, Bound, PlanAbort
from drumline.contract.ports import LogprobPlan
from drumline.contract.result import ForwardResult, RowLogprobs, RowPooled
from drumline.control.output.columns import add_refusal, add_request, add_tokens
from drumline.control.output.crossings import Crossings
from drumline.control.output.deadlines import Deadlines
from drumline.control.output.endings import (
    AT_LENGTH,
    ENDED_BY_CLIENT,
    GRAMMAR_FAULT,
    LATE,
    NOT_FINITE,
    PROCESSOR_FAULT,
    STUCK,
)
from drumline.control.output.seats import Flags, Seats
from drumline.control.output.steady import Steady
from drumline.control.requests import (
    NO_CAPACITY,
    Ended,
    Ending,
    Reason,
    Refusal,
    Request,
)
from drumline.core.errors import InvariantError
from drumline.scheduler.events import Aborted, Event, Finished, Results

Indices = npt.NDArray[np.intp]


class Outcome(Struct):
    """What a round's calls produced: to advance, to send, to release, to log."""

    events: list[Event]
    columns: OutputColumns
    released: list[str]
    ended: list[Ended]


class Outputs:
    """Every live request and what became of it."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._by_rid: dict[str, Request] = {}
        self._crossings = Crossings()
        self._deadlines = Deadlines()
        self._seats = Seats(max_rows, vocab_size)
        self._steady: Steady | None = None
        self._seen: IntArray | None = None
        """The rows of the last batch; one that comes again is worth remembering."""
        self._outcome = Outcome([], OutputColumns(), [], [])

    @property
    def running(self) -> int:
        """Requests admitted and not ended."""
        return len(self._by_rid)

    def holds(self, rid: str) -> bool:
        """Whether `rid` names a live request."""
        return rid in self._by_rid

    def owns(self, request: Request) -> bool:
        """Whether this very request is live; its id may be another's by now."""
        return self._by_rid.get(request.rid) is request

    def take(self) -> Outcome:
        """Return what happened since the last call."""
        outcome = self._outcome
        self._outcome = Outcome([], OutputColumns(), [], [])
        return outcome

    # Arrivals and ends that no forward decides

    def register(self, request: Request, now_us: int) -> bool:
        """Own a request from now on; False if its abort came before it, which ends it here."""
        self._by_rid[request.rid] = request
        if request.deadline_us:
            self._deadlines.add(request.rid, request.deadline_us)
        if not self._crossings.arrived(request.rid):
            return True
        self._end(request, ENDED_BY_CLIENT, now_us)
        return False

    def refuse(self, refusal: Refusal) -> None:
        """Answer a request that was never registered."""
        self._crossings.arrived(refusal.rid)
        self._crossings.ended(refusal.rid)
        add_refusal(self._outcome.columns, refusal)

    def abort(self, rid: str, now_us: int) -> None:
        """End a request whose client is gone; one that has not arrived yet, when it does."""
        request = self._by_rid.get(rid)
        if request is not None:
            self._abort(request, ENDED_BY_CLIENT, now_us)
        else:
            self._crossings.aborted(rid, now_us)

    def abort_all(self, ending: Ending, now_us: int) -> None:
        """End every live request."""
        for request in list(self._by_rid.values()):
            self._abort(request, ending, now_us)

    def expire(self, now_us: int) -> None:
        """End requests that are late; forget early aborts, and ids that ended, after a while."""
        self._crossings.expire(now_us)
        for rid in self._deadlines.late(now_us):
            self._abort(self._by_rid[rid], LATE, now_us)

    def fail(self, rids: Iterable[str], ending: Ending, now_us: int) -> None:
        """End requests that the scheduler did not take; it hears nothing of them."""
        for rid in rids:
            request = self._by_rid.get(rid)
            if request is not None:
                self._end(request, ending, now_us)

    def finish_plan_aborts(self, aborts: Sequence[PlanAbort], now_us: int) -> None:
        """End requests that the plan itself ended; the scheduler is done with them."""
        for abort in aborts:
            message = f"{abort.reason.value}: {abort.detail}"
            self.fail((abort.rid,), Ending(Reason.ABORT, message, NO_CAPACITY), now_us)

    def rids(self, rows: IntArray) -> list[str | None]:
        """Return which requests rows serve; None for those that ended."""
        return self._seats.rids(rows)

    # A plan and its forward

    def suspend(self, rid: str, now_us: int) -> None:
        """Note that a request lost its row in this round's plan; it may get another one later."""
        request = self._by_rid.get(rid)
        if request is not None and request.row:
            self._unbind(request)
            request.suspensions += 1
            request.suspended_us = now_us

    def bind(self, bound: Bound, cached_tokens: int, now_us: int) -> bool:
        """Note that a row serves a request from this round's plan on; whether it is its first."""
        self._settle()
        request = self._by_rid.get(bound.rid)
        if self._seats.requests[bound.row] is not None:
            raise InvariantError(
                f"row {bound.row} is bound to {bound.rid!r} while it serves another"
            )
        if request is None:
            # It ended this round; the scheduler hears of it at the tail.
            return False
        first = request.scheduled_us < 0
        if request.row:
            self._unbind(request)
        if first:
            request.cached_tokens = cached_tokens
            request.scheduled_us = now_us
        request.resume(now_us)
        self._seats.take(request, bound)
        return first

    def logprob_plan(self, batch: Batch) -> LogprobPlan | None:
        """Return which of the batch's sampling rows want log probabilities, if any does."""
        return self._seats.logprob_plan(batch)

    def commit(self, batch: Batch, result: ForwardResult, now_us: int) -> None:
        """Apply a forward's results to its batch's rows.

        Raises InvariantError if the result is not one of this batch.
        """
        rows, counts, tokens = batch.rows, result.counts, result.tokens
        steady, stop_users = self._steady, self._seats.stop_users
        if steady is not None and steady.fits(batch, result) and not stop_users[tokens].any():
            self._outcome.events.append(Results(rows, batch.generations, counts, tokens))
            self._commit_steady(steady, tokens)
            return
        self._settle()
        if len(counts) != len(rows):
            raise InvariantError(f"a forward of {len(rows)} rows returned {len(counts)} counts")
        live = self._seats.generation[rows] == batch.generations
        if len(result.nan_indices):
            # Before the results: what these rows computed must not be published.
            self._end_faulty(rows, live, result.nan_indices, NOT_FINITE, now_us)
        for faulty, ending in (
            (result.grammar_faults, GRAMMAR_FAULT),
            (result.stuck, STUCK),
            (result.processor_faults, PROCESSOR_FAULT),
        ):
            if len(faulty):
                self._end_faulty(rows, live, faulty, ending, now_us)
        for told in result.prompt_logprobs:
            if live[told.index]:
                self._add_prompt_logprobs(int(rows[told.index]), told)
        for chunk in result.pooled:
            if live[chunk.index]:
                self._add_pooled(int(rows[chunk.index]), chunk)
        self._outcome.events.append(Results(rows, batch.generations, counts, tokens))
        logprobs = {entry.index: entry for entry in result.logprobs}
        single = live & (counts == 1)
        if len(tokens) == len(rows) and single.all():
            self._commit_singles(rows, tokens, None, logprobs, now_us)
            self._remember(batch)
            return
        ends = np.cumsum(counts)
        if ends[-1] != len(tokens):
            raise InvariantError(
                f"a forward returned {len(tokens)} tokens for counts of {ends[-1]} in all"
            )
        starts = ends - counts
        indices = np.flatnonzero(single)
        self._commit_singles(rows[indices], tokens[starts[indices]], indices, logprobs, now_us)
        for index in np.flatnonzero(live & (counts > 1)).tolist():
            start = int(starts[index])
            ids = tokens[start : start + int(counts[index])].tolist()
            self._commit_ids(int(rows[index]), ids, logprobs.get(index), now_us)

    def _add_prompt_logprobs(self, row: int, told: RowLogprobs) -> None:
        request = self._seats.requests[row]
        if request is None or request.prompt_logprobs is None:
            raise InvariantError(f"row {row} is told of a prompt that nobody asked about")
        prompt = request.prompt_logprobs
        prompt.values += told.sampled
        prompt.top_values += map(list, told.top_values)
        prompt.top_ids += map(list, told.top_ids)

    def _add_pooled(self, row: int, chunk: RowPooled) -> None:
        request = self._seats.requests[row]
        if request is None or request.pooled is None:
            raise InvariantError(f"row {row} is told of a vector that nobody asked for")
        request.pooled.add(chunk.start, chunk.tokens, chunk.values)

    def _commit_steady(self, steady: Steady, tokens: IntArray) -> None:
        """Commit one token to each row of a batch that is as it was."""
        steady.headroom -= 1
        steady.produced += 1
        produced = steady.produced
        if len(steady.quiet):
            self._seats.hold(steady.rows[steady.quiet], tokens[steady.quiet])
            tokens, produced = tokens[steady.loud], produced[steady.loud]
        if len(tokens):
            add_tokens(
                self._outcome.columns,
                steady.rids,
                steady.prompt_tokens,
                steady.cached_tokens,
                tokens,
                produced,
            )

    def _remember(self, batch: Batch) -> None:
        """Note a batch that came twice, if nothing of it needs Python next time."""
        seats, rows = self._seats, batch.rows
        again = rows is self._seen
        self._seen = rows
        if not again or seats.attention[rows].any():
            return
        if not np.array_equal(seats.generation[rows], batch.generations):
            return
        produced = seats.produced[rows]
        headroom = int((seats.limit[rows] - produced).min())
        self._steady = Steady(batch, seats.owners(rows), produced, headroom, seats.streams[rows])

    def _settle(self) -> None:
        """Put the counts of the remembered batch back where everybody finds them."""
        steady, self._steady = self._steady, None
        if steady is not None:
            self._seats.produced[steady.rows] = steady.produced

    def _commit_singles(
        self,
        rows: IntArray,
        tokens: IntArray,
        indices: Indices | None,
        logprobs: dict[int, RowLogprobs],
        now_us: int,
    ) -> None:
        """Commit one token a row; `indices` are the rows' batch indices unless they count up."""
        seats = self._seats
        produced = seats.produced[rows] + 1
        due = seats.attention[rows]
        due |= seats.stop_users[tokens] > 0
        due |= produced >= seats.limit[rows]
        streams = seats.streams[rows]
        if due.any():
            for i in np.flatnonzero(due).tolist():
                index = i if indices is None else int(indices[i])
                row, token = int(rows[i]), int(tokens[i])
                self._commit_ids(row, [token], logprobs.get(index), now_us)
            rest = np.flatnonzero(~due)
            rows, tokens, produced, streams = (
                rows[rest],
                tokens[rest],
                produced[rest],
                streams[rest],
            )
        seats.produced[rows] = produced
        quiet = np.flatnonzero(~streams)
        if len(quiet):
            seats.hold(rows[quiet], tokens[quiet])
            loud = np.flatnonzero(streams)
            rows, tokens, produced = rows[loud], tokens[loud], produced[loud]
        requests = seats.owners(rows)
        add_tokens(
            self._outcome.columns,
            [request.rid for request in requests],
            [request.prompt_tokens for request in requests],
            [request.cached_tokens for request in requests],
            tokens,
            produced,
        )

    def _commit_ids(
        self, row: int, ids: list[int], logprobs: RowLogprobs | None, now_us: int
    ) -> None:
        """Commit one row's tokens, up to its end if they hold one."""
        seats = self._seats
        request = seats.of(row)
        if request.first_token_us < 0:
            request.first_token_us = now_us
            seats.attention[row] = request.return_logprob
        seats.flush(row)
        produced = int(seats.produced[row])
        ending: Ending | None = None
        taken = 0
        for token in ids:
            taken += 1
            produced += 1
            if token in request.stops and produced > request.min_new_tokens:
                ending = Ending(Reason.STOP, matched=token)
                break
            if produced >= request.limit:
                ending = AT_LENGTH
                break
        seats.produced[row] = produced
        request.held += ids[:taken]
        if logprobs is not None:
            request.held_logprobs += logprobs.sampled[:taken]
            request.held_top_logprobs += [list(best) for best in logprobs.top_values[:taken]]
            request.held_top_ids += [list(best) for best in logprobs.top_ids[:taken]]
        if ending is not None:
            self._outcome.events.append(Finished(request.rid))
            self._end(request, ending, now_us)
        elif request.stream:
            add_request(self._outcome.columns, request, produced, None)
            seats.streams[row] = True

    def _end_faulty(
        self, rows: IntArray, live: Flags, indices: IntArray, ending: Ending, now_us: int
    ) -> None:
        for index in indices.tolist():
            request = self._seats.requests[int(rows[index])]
            if live[index] and request is not None:
                self._abort(request, ending, now_us)
        live[indices] = False

    # Ends

    def _abort(self, request: Request, ending: Ending, now_us: int) -> None:
        self._outcome.events.append(Aborted(request.rid))
        self._end(request, ending, now_us)

    def _end(self, request: Request, ending: Ending, now_us: int) -> None:
        """Forget a request and tell its client, once."""
        if request.row:
            self._unbind(request)
        del self._by_rid[request.rid]
        self._crossings.ended(request.rid)
        self._deadlines.ended(request.rid)
        if request.known_to_device:
            self._outcome.released.append(request.rid)
        self._outcome.ended.append(Ended(request, ending, request.produced, now_us))
        add_request(self._outcome.columns, request, request.produced, ending)

    def _unbind(self, request: Request) -> None:
        self._settle()
        self._seats.leave(request)

    def check(self) -> None:
        """Raise InvariantError unless rows and ids tell one story."""
        seated = self._seats.check()
        for request in filter(None, self._seats.requests):
            if self._by_rid.get(request.rid) is not request:
                raise InvariantError(f"a row serves {request!r}, which is over")
        if seated != sum(request.row != 0 for request in self._by_rid.values()):
            raise InvariantError("requests with a row and rows with a request differ in number")
