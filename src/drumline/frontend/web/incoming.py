"""What a client sends, and whether it still listens."""

import asyncio
import re
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope

from drumline.core.errors import RequestError, excerpt

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`")

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header of this lower-case `name`, or None."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def given_request_id(scope: Scope) -> str | None:
    """Return the id that the client chose in `X-Request-Id`, or None.

    Raises RequestError 400 for one that cannot stand in a header or a log.
    """
    given = header(scope, b"x-request-id")
    return given if given is None else checked_request_id(given, "X-Request-Id")


def checked_request_id(given: str, param: str) -> str:
    """Return an id that a client chose in `param`.

    Raises RequestError 400 for one that cannot stand in a header or a log.
    """
    if not _REQUEST_ID.fullmatch(given):
        raise RequestError(
            400,
            f"{param} is not 1 to 128 printable ASCII characters without spaces",
            param=param,
            code="invalid_request_id",
        )
    return given


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the request's body.

    Raises RequestError 413 for one over `limit` bytes, once it was read to its end or to
    twice the limit: a client that is still sending would miss the answer.
    Raises ClientGoneError when the client goes before it is complete.
    """
    parts: list[bytes] = []
    size = 0
    more = True
    while more and size <= 2 * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
        more = message.get("more_body", False)
    if size > limit:
        said = header(scope, b"content-length") or f"at least {size}"
        raise RequestError(
            413,
            f"the body has {said} bytes; {limit} are allowed",
            code="body_too_large",
        )
    return b"".join(parts)


def decode_json(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a JSON body. Raises RequestError 400 naming the field that does not fit."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        what, where = (found["what"], found["where"]) if found else (str(error), None)
        what = excerpt(what)
        missing = _MISSING.match(what)
        if missing:
            field = ".".join(part for part in (where, missing["field"]) if part)
            raise RequestError(
                400, f"{field} is missing", param=field, code="missing_required_parameter"
            ) from None
        name = where or None
        raise RequestError(
            400, f"{name or 'the body'}: {what}", param=name, code="invalid_type"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            400, f"the body is not valid JSON: {error}", code="invalid_json"
        ) from None


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled as soon as the client disconnects.

    Raises ClientGoneError in that case. The body must have been read before.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
