"""Ends of requests that have nothing of their own to say."""

from drumline.control.requests import (
    CLIENT_ERROR,
    CLIENT_GONE,
    ENGINE_ERROR,
    TIMED_OUT,
    Ending,
    Reason,
)
from drumline.wire.output import NUMERICAL_ERROR

ENDED_BY_CLIENT = Ending(Reason.ABORT, "the client asked for it", CLIENT_GONE)
NOT_FINITE = Ending(
    Reason.ABORT,
    "the model's output was not finite (NaN or infinity)",
    ENGINE_ERROR,
    code=NUMERICAL_ERROR,
)
GRAMMAR_FAULT = Ending(
    Reason.ABORT,
    "the grammar could not go on: it met a limit of its library",
    ENGINE_ERROR,
)
STUCK = Ending(
    Reason.ABORT,
    "no token is left that may come next: what the request forbids and what it is held to "
    "exclude each other, or its grammar asks for what the model's vocabulary cannot spell",
    CLIENT_ERROR,
)
PROCESSOR_FAULT = Ending(
    Reason.ABORT, "a logits processor failed; the engine's log says how", ENGINE_ERROR
)
LATE = Ending(Reason.ABORT, "the request's deadline passed before its answer ended", TIMED_OUT)
AT_LENGTH = Ending(Reason.LENGTH)
