"""A request as the control plane knows it, and how one ends.

These are the nouns that ingress, output and the log lines share. Nothing here
decides: a request is filled in by whoever owns the step, and it knows neither the
scheduler nor the wire.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from msgspec import Struct

from drumline.contract.grammar import Grammar
from drumline.contract.request import Admission, GenerateRequest, Pooling
from drumline.core.errors import InvariantError
from drumline.scheduler.events import RequestSpec

CLIENT_ERROR = 400
TIMED_OUT = 408
CONFLICT = 409
CLIENT_GONE = 499
TOO_MANY = 429
ENGINE_ERROR = 500
NO_CAPACITY = 503


class Reason(StrEnum):
    """Why a request ended, as the wire says it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Ending(Struct, frozen=True):
    """How a request ended; the fields behind `reason` are those that apply."""

    reason: Reason
    message: str = ""
    status: int = 0
    matched: int | None = None
    code: int | None = None

    def details(self) -> dict[str, Any] | None:
        """Return what a client may want to know beyond the reason."""
        match self.reason:
            case Reason.STOP:
                return None if self.matched is None else {"type": "stop", "matched": self.matched}
            case Reason.LENGTH:
                return None
            case Reason.ABORT:
                told: dict[str, Any] = {"type": "abort", "message": self.message}
                if self.status:
                    told["status_code"] = self.status
                if self.code is not None:
                    told["err_type"] = self.code
                return told


class PromptLogprobs(Struct):
    """Log probabilities of a prompt's tokens from `start` on, as far as they are computed.

    The first one's is None. `top_*` has those of other tokens at each place, where they were
    asked for.
    """

    start: int
    ids: list[int]
    """The prompt's tokens from `start` on."""
    wants_top: bool
    values: list[float | None] = []
    top_values: list[list[float] | None] = []
    top_ids: list[list[int] | None] = []


class Pooled(Struct):
    """The vector that a prompt becomes, as far as it is computed."""

    pooling: Pooling
    tokens: int = 0
    """How many of the prompt's first tokens are in it."""
    values: list[float] = []

    def add(self, start: int, tokens: int, values: Sequence[float]) -> None:
        """Take in a chunk; one that is computed again begins anew."""
        if start == 0 or self.pooling is Pooling.LAST:
            self.values, self.tokens = list(values), start + tokens
        elif start == self.tokens:
            self.values = [one + other for one, other in zip(self.values, values, strict=True)]
            self.tokens += tokens
        else:
            raise InvariantError(f"a chunk from {start} on follows {self.tokens} pooled tokens")

    def vector(self) -> bytes:
        """Return it as float32, little-endian."""
        whole = np.array(self.values, "<f4")
        return (whole if self.pooling is Pooling.LAST else whole / self.tokens).tobytes()


class Request:
    """One live request.

    While it holds a pool row, the tokens it has produced are counted in the row
    arrays of `output`; `produced` is the count otherwise. `held` has the ids that
    its client has not been sent, with their log probabilities beside them. Times
    are microseconds of the relayed clock, -1 until they happen; the first token's is its
    commit's, which lies within a round. All but the deadline are told and decide nothing.
    """

    __slots__ = (
        "arrived_us",
        "cached_tokens",
        "deadline_us",
        "first_token_us",
        "grammar",
        "held",
        "held_logprobs",
        "held_top_ids",
        "held_top_logprobs",
        "known_to_device",
        "limit",
        "min_new_tokens",
        "pooled",
        "produced",
        "prompt_logprobs",
        "prompt_tokens",
        "return_logprob",
        "rid",
        "row",
        "scheduled_us",
        "stops",
        "stream",
        "suspended_for_us",
        "suspended_us",
        "suspensions",
        "top_logprobs",
    )

    def __init__(
        self,
        asked: GenerateRequest,
        *,
        prompt_tokens: int,
        limit: int,
        stops: frozenset[int],
        now_us: int,
    ) -> None:
        self.rid = asked.rid
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.min_new_tokens = asked.min_new_tokens
        self.grammar = asked.grammar
        self.stops = stops
        self.stream = asked.stream
        self.return_logprob = asked.return_logprob
        self.top_logprobs = asked.top_logprobs if asked.return_logprob else 0
        self.known_to_device = False
        self.row = 0
        self.produced = 0
        self.cached_tokens = 0
        self.held: list[int] = []
        self.held_logprobs: list[float] = []
        self.held_top_logprobs: list[list[float]] = []
        self.held_top_ids: list[list[int]] = []
        self.prompt_logprobs = _prompt_logprobs(asked)
        self.pooled = None if asked.pooling is None else Pooled(asked.pooling)
        self.arrived_us = now_us
        self.deadline_us = now_us + asked.deadline_us if asked.deadline_us else 0
        self.scheduled_us = -1
        self.first_token_us = -1
        self.suspensions = 0
        self.suspended_us = -1
        """Since when it has been suspended; -1 while it is not."""
        self.suspended_for_us = 0

    def resume(self, now_us: int) -> None:
        """Note that it is not suspended any more, if it was."""
        if self.suspended_us >= 0:
            self.suspended_for_us += now_us - self.suspended_us
            self.suspended_us = -1

    def __repr__(self) -> str:
        return (
            f"Request({self.rid!r}, row={self.row}, prompt={self.prompt_tokens}, "
            f"limit={self.limit})"
        )


def _prompt_logprobs(asked: GenerateRequest) -> PromptLogprobs | None:
    start = asked.prompt_logprobs_from
    if start < 0:
        return None
    wants_top = bool(asked.top_logprobs or asked.logprob_ids)
    told = PromptLogprobs(start, asked.input_ids[start:].tolist(), wants_top, [None])
    if wants_top:
        told.top_values, told.top_ids = [None], [None]
    return told


class Admitted(Struct, frozen=True):
    """A request that this engine serves: its state, what the data plane and the scheduler learn."""

    request: Request
    admission: Admission
    spec: RequestSpec
    grammar: Grammar | None = None
    """What the request's grammar became, once it is compiled on every rank."""


class Refusal(Struct, frozen=True):
    """A request that this engine does not serve, and what its client is told."""

    rid: str
    prompt_tokens: int
    ending: Ending


class Ended(Struct, frozen=True):
    """A request that is over, for whoever keeps count."""

    request: Request
    ending: Ending
    produced: int
    at_us: int
