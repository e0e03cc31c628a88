"""How the replies of an API are framed: its events, its errors, the header of an id.

A route that does not speak OpenAI's dialect says so in the request's scope, where whoever
answers finds it, be it a guard in front of the route.
"""

from collections.abc import Callable

from msgspec import Struct
from starlette.types import ASGIApp, Receive, Scope, Send

from drumline.core.errors import RequestError
from drumline.frontend.web.errors import ErrorBody, error_body

_PLACE = "drumline.dialect"


class Dialect(Struct, frozen=True, kw_only=True):
    """The frame of an API's replies."""

    failure: Callable[[RequestError, str], bytes]
    """The body of a refusal, and the last event of a stream that failed; told the request's id."""
    error_body: type[Struct] = ErrorBody
    """The shape of a refusal's body."""
    named: bool = False
    """Whether events are written with their names, which are then part of them."""
    ping: bytes = b": ping\n\n"
    end: bytes = b"data: [DONE]\n\n"
    """What a stream ends with."""
    id_headers: tuple[bytes, ...] = (b"x-request-id",)

    def framed(self, event: bytes) -> bytes:
        """Return an event as it is sent."""
        return (b"" if self.named else b"data: ") + event + b"\n\n"

    def failed(self, error: RequestError, request_id: str) -> bytes:
        """Return the last event of a stream that failed."""
        body = self.failure(error, request_id)
        return self.framed(b"event: error\ndata: " + body if self.named else body)


OPENAI = Dialect(failure=lambda error, _: error_body(error))


def dialect_of(scope: Scope) -> Dialect:
    """Return the dialect in which a request is answered."""
    dialect: Dialect = scope.get(_PLACE, OPENAI)
    return dialect


class Speaking:
    """An application whose replies are in a dialect, those of what stands before it included."""

    def __init__(self, dialect: Dialect, app: ASGIApp) -> None:
        self._dialect = dialect
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, _PLACE: self._dialect}, receive, send)
