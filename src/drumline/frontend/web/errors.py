"""Errors in OpenAI's shape.

Every refusal reads `{"error": {"message", "type", "param", "code"}}`. Clients of OpenAI
retry 408, 409, 429 and every 5xx by themselves, so where a retry cannot help, the
reply says `x-should-retry: false`, and where waiting helps, how long.
"""

import msgspec
from msgspec import Struct

from drumline.core.errors import PeerError, RequestError

Headers = tuple[tuple[bytes, bytes], ...]

ENGINE_DEAD = "engine_dead"
DRAINING = "draining"
REQUEST_ID_IN_USE = "request_id_in_use"
TIMED_OUT = "request_timeout"
TOO_MANY = "too_many_requests"

_NO_RETRY: Headers = ((b"x-should-retry", b"false"),)
_RETRY_SOON: Headers = ((b"retry-after", b"5"),)
_HEADERS: dict[str | None, Headers] = {
    ENGINE_DEAD: _NO_RETRY,
    REQUEST_ID_IN_USE: _NO_RETRY,
    TIMED_OUT: _NO_RETRY,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_SERVER_ERRORS = 500
_NOT_IMPLEMENTED = 501
_WAIT = {429, 503}


class ErrorDetail(Struct, frozen=True):
    """What went wrong. `param` names the field at fault, `code` the kind of error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True):
    """The body of a refusal, and the last event of a stream that failed."""

    error: ErrorDetail


def internal_error() -> RequestError:
    """Return what a client is told of a fault of ours; the log has the rest."""
    return RequestError(
        500, "the server failed on this request; its log says more", code="internal"
    )


def as_request_error(error: PeerError) -> RequestError:
    """Return what a client is told when the engine is gone."""
    return RequestError(503, f"the engine is gone: {error}", code=ENGINE_DEAD)


def shutting_down() -> RequestError:
    """Return what a client is told while the server stops."""
    return RequestError(503, "the server is shutting down", code=DRAINING)


def timed_out(seconds: float) -> RequestError:
    """Return what a client is told whose request took longer than the operator allows."""
    return RequestError(
        408, f"the request took longer than {seconds:g} s, which this server allows",
        code=TIMED_OUT,
    )  # fmt: skip


def error_body(error: RequestError) -> bytes:
    """Return the JSON body of `error`."""
    kind = _TYPES.get(error.status) or (
        "server_error" if error.status >= _SERVER_ERRORS else "invalid_request_error"
    )
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, kind, error.param, error.code)))


def error_headers(error: RequestError) -> Headers:
    """Return the headers that tell a client whether and when to try again."""
    known = _HEADERS.get(error.code)
    if known is not None:
        return known
    if error.status in _WAIT:
        return _RETRY_SOON
    return _NO_RETRY if error.status == _NOT_IMPLEMENTED else ()
