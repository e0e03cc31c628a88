"""How replies of the messages API are framed, and what its errors look like."""

import msgspec
from msgspec import Struct

from drumline.core.errors import RequestError
from drumline.frontend.web.dialect import Dialect

_encode = msgspec.json.Encoder().encode

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_SERVER_ERRORS = 500


class AnthropicErrorDetail(Struct):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorBody(Struct):
    """The body of a refusal, and of a stream's last event where it failed."""

    error: AnthropicErrorDetail
    request_id: str
    type: str = "error"


def _failure(error: RequestError, request_id: str) -> bytes:
    kind = _TYPES.get(error.status) or (
        "api_error" if error.status >= _SERVER_ERRORS else "invalid_request_error"
    )
    return _encode(AnthropicErrorBody(AnthropicErrorDetail(kind, error.message), request_id))


ANTHROPIC = Dialect(
    failure=_failure,
    error_body=AnthropicErrorBody,
    named=True,
    ping=b'event: ping\ndata: {"type": "ping"}\n\n',
    end=b"",
    id_headers=(b"request-id", b"x-request-id"),
)
