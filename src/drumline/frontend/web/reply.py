"""The answer to one HTTP request, written straight to the server's `send`.

Either one body with its length, or a stream of server-sent events. While a stream
is silent a comment goes out now and then, which clients skip and proxies take for
life.
"""

import asyncio
from collections.abc import Iterable
from typing import Self

from starlette.types import Scope, Send

from drumline.core.errors import RequestError
from drumline.frontend.web.dialect import OPENAI, Dialect, dialect_of
from drumline.frontend.web.errors import Headers, error_headers
from drumline.frontend.web.incoming import given_request_id

JSON = b"application/json"


class Reply:
    """One answer; `started` once its status is on its way and cannot change any more."""

    __slots__ = ("_dialect", "_pinging", "_send", "_time", "_wrote_at", "request_id", "started")

    def __init__(self, send: Send, request_id: str, dialect: Dialect = OPENAI) -> None:
        self._dialect = dialect
        self._send = send
        self.request_id = request_id
        self.started = False
        self._wrote_at = 0.0
        self._time = asyncio.get_running_loop().time
        self._pinging: asyncio.Task[None] | None = None

    @classmethod
    def to(cls, scope: Scope, send: Send, own_id: str) -> Self:
        """Return the reply to a request, under the id that it chose if that can stand there."""
        try:
            return cls(send, given_request_id(scope) or own_id, dialect_of(scope))
        except RequestError:
            return cls(send, own_id, dialect_of(scope))

    async def body(
        self, data: bytes, *, status: int = 200, kind: bytes = JSON, headers: Headers = ()
    ) -> None:
        """Send the whole answer."""
        length = (b"content-length", str(len(data)).encode())
        await self._start(status, kind, (length, *headers))
        await self._send({"type": "http.response.body", "body": data})

    async def error(self, error: RequestError, headers: Headers = ()) -> None:
        """Answer with `error`; in a stream, as its last event."""
        if self._pinging is not None:
            await self._write(self._dialect.failed(error, self.request_id))
            await self.done()
        elif not self.started:
            await self.body(
                self._dialect.failure(error, self.request_id),
                status=error.status,
                headers=(*error_headers(error), *headers),
            )

    async def open_stream(self, ping_s: float) -> None:
        """Begin a stream of events, with a comment after every `ping_s` of silence."""
        await self._start(
            200, b"text/event-stream; charset=utf-8", ((b"cache-control", b"no-cache"),)
        )
        self._pinging = asyncio.create_task(self._ping(ping_s))

    async def event(self, data: bytes) -> None:
        """Send one event. Waits while the client reads slower than it is written to."""
        await self._write(self._dialect.framed(data))

    async def events(self, data: Iterable[bytes]) -> None:
        """Send events that belong together in one piece."""
        if isinstance(data, list) and len(data) == 1:
            await self._write(self._dialect.framed(data[0]))
            return
        whole = b"".join(map(self._dialect.framed, data))
        if whole:
            await self._write(whole)

    async def done(self) -> None:
        """End the stream, with the sentinel that clients wait for where they do."""
        self.close()
        await self._send(
            {"type": "http.response.body", "body": self._dialect.end, "more_body": False}
        )

    def close(self) -> None:
        """Stop what runs beside the stream; does nothing without one."""
        if self._pinging is not None:
            self._pinging.cancel()

    async def _start(self, status: int, kind: bytes, headers: Headers) -> None:
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"content-type", kind),
                    *((name, self.request_id.encode()) for name in self._dialect.id_headers),
                    *headers,
                ],
            }
        )

    async def _write(self, data: bytes) -> None:
        self._wrote_at = self._time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _ping(self, every_s: float) -> None:
        self._wrote_at = self._time()
        while True:
            quiet = self._time() - self._wrote_at
            if quiet >= every_s:
                await self._write(self._dialect.ping)
            else:
                await asyncio.sleep(every_s - quiet)
