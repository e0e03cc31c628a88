"""Applications that run an operation: fields in, its outcome out.

A body's fields may stand in the query as well. An operation that the engine refuses is
answered 400 with its reason, as `{"success": false, "message": …}`. It goes on to its end
whether or not its client waits for it, and is answered 503 where the server ends first.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw, Struct
from starlette.types import ASGIApp, Receive, Scope, Send

from drumline.core.errors import RequestError, excerpt
from drumline.frontend.engine_control import Outcome
from drumline.frontend.running import Running
from drumline.frontend.web.errors import TOO_MANY
from drumline.frontend.web.incoming import ClientGoneError, decode_json, header, read_body
from drumline.frontend.web.reply import Reply
from drumline.frontend.web.routes import Plain

Route = tuple[str, str, ASGIApp]
"""Methods, path, and what answers there."""

T = TypeVar("T", bound=Struct)

_LISTS = {"tags", "activities"}
"""Fields that a query may name several times."""

_BYTES = "application/octet-stream"

_encode = msgspec.json.Encoder().encode
_decode_object = msgspec.json.Decoder(dict[str, Any])


class Operation(Generic[T]):
    """An application that reads an operation's fields, runs it, and tells what became of it.

    A body of bytes is the one entry of the field `carries`, if the operation has such a field.
    Bodies are read one at a time where there are `turns`.
    """

    def __init__(
        self,
        limit: int,
        running: Running,
        fields: type[T],
        run: Callable[[T], Coroutine[Any, Any, Struct | Raw]],
        *,
        carries: str | None = None,
        turns: "Turns | None" = None,
    ) -> None:
        self._limit = limit
        self._running = running
        self._fields = fields
        self._run = run
        self._carries = carries
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(scope: Scope, reply: Reply) -> None:
            turns = self._turns
            async with nullcontext() if turns is None else turns.turn():
                try:
                    async with nullcontext() if turns is None else turns.reading():
                        body = await read_body(scope, receive, self._limit)
                except ClientGoneError:
                    return
                asked = self._read(scope, body)
                del body
                told = await self._running.answered(self._run(asked))
            refused = isinstance(told, Outcome) and not told.success
            await reply.body(_encode(told), status=400 if refused else 200)

        await Plain(answer)(scope, receive, send)

    def _read(self, scope: Scope, body: bytes) -> T:
        """Return the fields of body and query. Raises RequestError 400 naming what does not fit."""
        given: dict[str, Any] = {}
        if self._carries is not None and header(scope, b"content-type") == _BYTES:
            given[self._carries] = [body]
        elif body.strip():
            given = decode_json(body, _decode_object)
        for name, values in parse_qs(scope["query_string"].decode("latin-1")).items():
            if name in given or (len(values) > 1 and name not in _LISTS):
                raise RequestError(400, f"{name} is given twice", param=name)
            given[name] = values if name in _LISTS else values[0]
        try:
            return msgspec.convert(given, self._fields, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(self._fields.__struct_fields__) or "no fields"
            raise RequestError(
                400,
                f"{excerpt(str(error))}; {scope['path']} takes {known}",
                code="invalid_parameter",
            ) from None


class Turns:
    """One large body after the other, so that memory for one is enough."""

    def __init__(self, wait_s: float, body_s: float) -> None:
        """Let whoever comes wait `wait_s` for its turn, and give it `body_s` to send its body."""
        self._wait_s = wait_s
        self._body_s = body_s
        self._free = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Keep the turn. Raises RequestError 429 where it does not come in time."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise RequestError(
                429,
                f"another body of tensors is being read or loaded, for {self._wait_s:g} s at "
                "least; send one after the other",
                code=TOO_MANY,
            ) from None
        try:
            yield
        finally:
            self._free.release()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read a body. Raises RequestError 408 where it does not come in time."""
        try:
            async with asyncio.timeout(self._body_s):
                yield
        except TimeoutError:
            raise RequestError(
                408, f"the body did not come within {self._body_s:g} s", code="request_timeout"
            ) from None


class Nothing(Struct, forbid_unknown_fields=True):
    """Of operations that need no word."""
