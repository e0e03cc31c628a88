"""Commits forwards: who produced what, who is over, and what its client is told.

Owns every live request, by id and by pool row. The state a decode round touches
lies in arrays by row, so that a steady round is a few vector operations; Python
runs per request only for rows that start, end or need it. It returns the
scheduler's events, the frontend's columns and the ids to release, all at once
when the round asks for them, and knows neither of their takers.
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
from drumline.control.output.steady import Steady
from drumline.control.requests import (
    CLIENT_ERROR,
    CLIENT_GONE,
    ENGINE_ERROR,
    NO_CAPACITY,
    TIMED_OUT,
    Ended,
    Ending,
    Reason,
    Refusal,
    Request,
)
from drumline.core.errors import InvariantError
from drumline.scheduler.events import Aborted, Event, Finished, Results
from drumline.wire.output import NUMERICAL_ERROR

Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]

HELD = 64
"""Ids of a row that are held in its array before they move to its request."""

_ENDED_BY_CLIENT = Ending(Reason.ABORT, "the client asked for it", CLIENT_GONE)
_NOT_FINITE = Ending(
    Reason.ABORT,
    "the model's output was not finite (NaN or infinity)",
    ENGINE_ERROR,
    code=NUMERICAL_ERROR,
)
_GRAMMAR_FAULT = Ending(
    Reason.ABORT,
    "the grammar could not go on: it met a limit of its library",
    ENGINE_ERROR,
)
_STUCK = Ending(
    Reason.ABORT,
    "no token is left that may come next: what the request forbids and what it is held to "
    "exclude each other, or its grammar asks for what the model's vocabulary cannot spell",
    CLIENT_ERROR,
)
_PROCESSOR_FAULT = Ending(
    Reason.ABORT, "a logits processor failed; the engine's log says how", ENGINE_ERROR
)
_LATE = Ending(Reason.ABORT, "the request's deadline passed before its answer ended", TIMED_OUT)
_AT_LENGTH = Ending(Reason.LENGTH)


class Outcome(Struct):
    """What a round's calls produced: to advance, to send, to release, to log."""

    events: list[Event]
    columns: OutputColumns
    released: list[str]
    ended: list[Ended]


class Outputs:
    """Every live request and what became of it."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        size = max_rows + 1
        self._by_rid: dict[str, Request] = {}
        self._crossings = Crossings()
        self._deadlines = Deadlines()
        # By row. A row whose generation is not a batch's serves somebody else by now, or
        # nobody (-1): the batch's results for it are void.
        self._requests: list[Request | None] = [None] * size
        self._generation = np.full(size, -1, np.int32)
        self._produced = np.zeros(size, np.int32)
        self._limit = np.zeros(size, np.int32)
        self._streams = np.zeros(size, np.bool_)
        self._attention = np.zeros(size, np.bool_)
        """Rows whose next token must be seen in Python: a first one, one with log probabilities."""
        self._top = np.full(size, -1, np.int32)
        """How many of the best log probabilities a row wants; -1: none, not even its own."""
        self._prompt_from = np.full(size, -1, np.int32)
        """From where on a row's prompt is told log probabilities of; -1: from nowhere."""
        self._held = np.zeros((size, HELD), np.int32)
        self._fill = np.zeros(size, np.int32)
        self._stop_users = np.zeros(vocab_size, np.int32)
        """By token: how many requests with a row may stop on it."""
        self._wanting_logprobs = 0
        self._pools = np.zeros(size, np.bool_)
        self._pooling = 0
        """Rows whose prompts become vectors."""
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
        self._end(request, _ENDED_BY_CLIENT, now_us)
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
            self._abort(request, _ENDED_BY_CLIENT, now_us)
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
            self._abort(self._by_rid[rid], _LATE, now_us)

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
        owners = [self._requests[row] for row in rows.tolist()]
        return [None if owner is None else owner.rid for owner in owners]

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
        row = bound.row
        request = self._by_rid.get(bound.rid)
        if self._requests[row] is not None:
            raise InvariantError(f"row {row} is bound to {bound.rid!r} while it serves another")
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
        request.row = row
        self._requests[row] = request
        self._generation[row] = bound.generation
        self._produced[row] = request.produced
        self._limit[row] = request.limit
        self._streams[row] = request.stream and not request.held
        self._attention[row] = not request.produced or request.return_logprob
        self._fill[row] = 0
        if request.return_logprob:
            self._top[row] = request.top_logprobs
            if request.prompt_logprobs is not None:
                self._prompt_from[row] = request.prompt_logprobs.start
            self._wanting_logprobs += 1
        if request.pooled is not None:
            self._pools[row] = True
            self._pooling += 1
        for token in request.stops:
            self._stop_users[token] += 1
        return first

    def logprob_plan(self, batch: Batch) -> LogprobPlan | None:
        """Return which of the batch's sampling rows want log probabilities, if any does."""
        if not self._wanting_logprobs and not self._pooling:
            return None
        top = self._top[batch.rows]
        wanted = top >= 0
        starts = batch.prefix_lengths[: batch.extends]
        ends = starts + batch.input_lengths[: batch.extends]
        wanted[: batch.extends] &= ends >= batch.prompt_lengths
        indices = np.flatnonzero(wanted).astype(np.int32)
        told_from = self._prompt_from[batch.rows[: batch.extends]]
        # Each token of a prompt is told where the one before it is computed.
        told = (told_from >= 0) & (ends > told_from)
        told &= np.maximum(starts, told_from) < batch.prompt_lengths - 1
        prompts = np.flatnonzero(told).astype(np.int32)
        pooled = np.flatnonzero(
            self._pools[batch.rows[: batch.extends]] & (starts < batch.prompt_lengths)
        ).astype(np.int32)
        if not len(indices) and not len(prompts) and not len(pooled):
            return None
        return LogprobPlan(indices, top[indices], prompts, top[prompts], pooled)

    def commit(self, batch: Batch, result: ForwardResult, now_us: int) -> None:
        """Apply a forward's results to its batch's rows.

        Raises InvariantError if the result is not one of this batch.
        """
        rows, counts, tokens = batch.rows, result.counts, result.tokens
        steady = self._steady
        if steady is not None and steady.fits(batch, result) and not self._stop_users[tokens].any():
            self._outcome.events.append(Results(rows, batch.generations, counts, tokens))
            self._commit_steady(steady, tokens)
            return
        self._settle()
        if len(counts) != len(rows):
            raise InvariantError(f"a forward of {len(rows)} rows returned {len(counts)} counts")
        live = self._generation[rows] == batch.generations
        if len(result.nan_indices):
            # Before the results: what these rows computed must not be published.
            self._end_faulty(rows, live, result.nan_indices, _NOT_FINITE, now_us)
        for faulty, ending in (
            (result.grammar_faults, _GRAMMAR_FAULT),
            (result.stuck, _STUCK),
            (result.processor_faults, _PROCESSOR_FAULT),
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
        request = self._requests[row]
        if request is None or request.prompt_logprobs is None:
            raise InvariantError(f"row {row} is told of a prompt that nobody asked about")
        prompt = request.prompt_logprobs
        prompt.values += told.sampled
        prompt.top_values += map(list, told.top_values)
        prompt.top_ids += map(list, told.top_ids)

    def _add_pooled(self, row: int, chunk: RowPooled) -> None:
        request = self._requests[row]
        if request is None or request.pooled is None:
            raise InvariantError(f"row {row} is told of a vector that nobody asked for")
        request.pooled.add(chunk.start, chunk.tokens, chunk.values)

    def _commit_steady(self, steady: Steady, tokens: IntArray) -> None:
        """Commit one token to each row of a batch that is as it was."""
        steady.headroom -= 1
        steady.produced += 1
        produced = steady.produced
        if len(steady.quiet):
            self._hold(steady.rows[steady.quiet], tokens[steady.quiet])
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
        again = batch.rows is self._seen
        self._seen = batch.rows
        if not again or self._attention[batch.rows].any():
            return
        if not np.array_equal(self._generation[batch.rows], batch.generations):
            return
        requests = [request for row in batch.rows.tolist() if (request := self._requests[row])]
        produced = self._produced[batch.rows]
        headroom = int((self._limit[batch.rows] - produced).min())
        self._steady = Steady(batch, requests, produced, headroom, self._streams[batch.rows])

    def _settle(self) -> None:
        """Put the counts of the remembered batch back where everybody finds them."""
        steady, self._steady = self._steady, None
        if steady is not None:
            self._produced[steady.rows] = steady.produced

    def _commit_singles(
        self,
        rows: IntArray,
        tokens: IntArray,
        indices: Indices | None,
        logprobs: dict[int, RowLogprobs],
        now_us: int,
    ) -> None:
        """Commit one token a row; `indices` are the rows' batch indices unless they count up."""
        produced = self._produced[rows] + 1
        due = self._attention[rows]
        due |= self._stop_users[tokens] > 0
        due |= produced >= self._limit[rows]
        streams = self._streams[rows]
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
        self._produced[rows] = produced
        quiet = np.flatnonzero(~streams)
        if len(quiet):
            self._hold(rows[quiet], tokens[quiet])
            loud = np.flatnonzero(streams)
            rows, tokens, produced = rows[loud], tokens[loud], produced[loud]
        requests = [request for row in rows.tolist() if (request := self._requests[row])]
        add_tokens(
            self._outcome.columns,
            [request.rid for request in requests],
            [request.prompt_tokens for request in requests],
            [request.cached_tokens for request in requests],
            tokens,
            produced,
        )

    def _hold(self, rows: IntArray, tokens: IntArray) -> None:
        """Keep one token a row for clients that want their answer whole."""
        fill = self._fill[rows]
        self._held[rows, fill] = tokens
        fill += 1
        self._fill[rows] = fill
        for row in rows[fill == HELD].tolist():
            self._flush(row)

    def _flush(self, row: int) -> None:
        request = self._requests[row]
        fill = int(self._fill[row])
        if request is not None and fill:
            request.held += self._held[row, :fill].tolist()
        self._fill[row] = 0

    def _commit_ids(
        self, row: int, ids: list[int], logprobs: RowLogprobs | None, now_us: int
    ) -> None:
        """Commit one row's tokens, up to its end if they hold one."""
        request = self._requests[row]
        if request is None:
            raise InvariantError(f"row {row} has results but serves no request")
        if request.first_token_us < 0:
            request.first_token_us = now_us
            self._attention[row] = request.return_logprob
        self._flush(row)
        produced = int(self._produced[row])
        ending: Ending | None = None
        taken = 0
        for token in ids:
            taken += 1
            produced += 1
            if token in request.stops and produced > request.min_new_tokens:
                ending = Ending(Reason.STOP, matched=token)
                break
            if produced >= request.limit:
                ending = _AT_LENGTH
                break
        self._produced[row] = produced
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
            self._streams[row] = True

    def _end_faulty(
        self, rows: IntArray, live: Flags, indices: IntArray, ending: Ending, now_us: int
    ) -> None:
        for index in indices.tolist():
            request = self._requests[int(rows[index])]
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
        """Take a request off its row, with what the row's arrays know of it."""
        self._settle()
        row = request.row
        self._flush(row)
        request.produced = int(self._produced[row])
        request.row = 0
        self._requests[row] = None
        self._generation[row] = -1
        self._attention[row] = False
        if self._top[row] >= 0:
            self._top[row] = self._prompt_from[row] = -1
            self._wanting_logprobs -= 1
        if self._pools[row]:
            self._pools[row] = False
            self._pooling -= 1
        for token in request.stops:
            self._stop_users[token] -= 1

    def check(self) -> None:
        """Raise InvariantError unless rows and ids tell one story."""
        stops = np.zeros_like(self._stop_users)
        for row, request in enumerate(self._requests):
            if request is None:
                if self._generation[row] != -1:
                    raise InvariantError(f"row {row} has a generation but serves no request")
                continue
            if self._by_rid.get(request.rid) is not request or request.row != row:
                raise InvariantError(f"row {row} serves {request!r}, which is elsewhere or over")
            for token in request.stops:
                stops[token] += 1
        seated = sum(request.row != 0 for request in self._by_rid.values())
        if seated != sum(request is not None for request in self._requests):
            raise InvariantError("requests with a row and rows with a request differ in number")
        if not np.array_equal(stops, self._stop_users):
            raise InvariantError("the stop ids in use are miscounted")
