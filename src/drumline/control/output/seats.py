"""The pool rows and which requests they serve, with what a commit must know of each at once.

The state that a decode round touches lies in arrays by row, so that a steady round is a few
vector operations. It knows who sits where, and neither how answers end nor what clients are told.
"""

import numpy as np
import numpy.typing as npt

from drumline.contract.arrays import IntArray
from drumline.contract.plan import Batch, Bound
from drumline.contract.ports import LogprobPlan
from drumline.control.requests import Request
from drumline.core.errors import InvariantError

Flags = npt.NDArray[np.bool_]

HELD = 64
"""Ids of a row that are held in its array before they move to its request."""


class Seats:
    """Every row. Arrays are indexed by row; a commit writes `produced` and `attention` itself."""

    __slots__ = (
        "_fill",
        "_held",
        "_pooling",
        "_pools",
        "_prompt_from",
        "_top",
        "_wanting_logprobs",
        "attention",
        "generation",
        "limit",
        "produced",
        "requests",
        "stop_users",
        "streams",
    )

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        size = max_rows + 1
        self.requests: list[Request | None] = [None] * size
        self.generation = np.full(size, -1, np.int32)
        """A row whose generation is not a batch's serves somebody else by now, or nobody (-1):
        the batch's results for it are void."""
        self.produced = np.zeros(size, np.int32)
        self.limit = np.zeros(size, np.int32)
        self.streams = np.zeros(size, np.bool_)
        self.attention = np.zeros(size, np.bool_)
        """Rows whose next token must be seen in Python: a first one, one with log probabilities."""
        self.stop_users = np.zeros(vocab_size, np.int32)
        """By token: how many requests with a row may stop on it."""
        self._top = np.full(size, -1, np.int32)
        """How many of the best log probabilities a row wants; -1: none, not even its own."""
        self._prompt_from = np.full(size, -1, np.int32)
        """From where on a row's prompt is told log probabilities of; -1: from nowhere."""
        self._wanting_logprobs = 0
        self._pools = np.zeros(size, np.bool_)
        self._pooling = 0
        """Rows whose prompts become vectors."""
        self._held = np.zeros((size, HELD), np.int32)
        self._fill = np.zeros(size, np.int32)

    def of(self, row: int) -> Request:
        """Return who has a row. Raises InvariantError where nobody has."""
        request = self.requests[row]
        if request is None:
            raise InvariantError(f"row {row} has results but serves no request")
        return request

    def owners(self, rows: IntArray) -> list[Request]:
        """Return the requests that rows serve, as far as they serve any."""
        return [request for row in rows.tolist() if (request := self.requests[row])]

    def rids(self, rows: IntArray) -> list[str | None]:
        """Return which requests rows serve; None for those that serve none."""
        owners = [self.requests[row] for row in rows.tolist()]
        return [None if owner is None else owner.rid for owner in owners]

    def take(self, request: Request, bound: Bound) -> None:
        """Have a row, which is free, serve a request."""
        row = request.row = bound.row
        self.requests[row] = request
        self.generation[row] = bound.generation
        self.produced[row] = request.produced
        self.limit[row] = request.limit
        self.streams[row] = request.stream and not request.held
        self.attention[row] = not request.produced or request.return_logprob
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
            self.stop_users[token] += 1

    def leave(self, request: Request) -> None:
        """Take a request off its row, with what the row's arrays know of it."""
        row = request.row
        self.flush(row)
        request.produced = int(self.produced[row])
        request.row = 0
        self.requests[row] = None
        self.generation[row] = -1
        self.attention[row] = False
        if self._top[row] >= 0:
            self._top[row] = self._prompt_from[row] = -1
            self._wanting_logprobs -= 1
        if self._pools[row]:
            self._pools[row] = False
            self._pooling -= 1
        for token in request.stops:
            self.stop_users[token] -= 1

    def hold(self, rows: IntArray, tokens: IntArray) -> None:
        """Keep one token a row for clients that want their answer whole."""
        fill = self._fill[rows]
        self._held[rows, fill] = tokens
        fill += 1
        self._fill[rows] = fill
        for row in rows[fill == HELD].tolist():
            self.flush(row)

    def flush(self, row: int) -> None:
        """Move what is held of a row to its request."""
        request = self.requests[row]
        fill = int(self._fill[row])
        if request is not None and fill:
            request.held += self._held[row, :fill].tolist()
        self._fill[row] = 0

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

    def check(self) -> int:
        """Return how many rows serve a request. Raises InvariantError unless all rows tell one
        story."""
        stops = np.zeros_like(self.stop_users)
        for row, request in enumerate(self.requests):
            if request is None:
                if self.generation[row] != -1:
                    raise InvariantError(f"row {row} has a generation but serves no request")
                continue
            if request.row != row:
                raise InvariantError(f"row {row} serves {request!r}, which is elsewhere")
            for token in request.stops:
                stops[token] += 1
        if not np.array_equal(stops, self.stop_users):
            raise InvariantError("the stop ids in use are miscounted")
        return sum(request is not None for request in self.requests)
