"""Small applications that routes are made of: one method, and an answer that comes at once."""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from drumline.core.errors import RequestError
from drumline.core.ids import request_id
from drumline.frontend.web.dialect import dialect_of
from drumline.frontend.web.errors import internal_error
from drumline.frontend.web.incoming import (
    ClientGoneError,
    given_request_id,
    read_body,
    unless_gone,
)
from drumline.frontend.web.reply import Reply

log = logging.getLogger(__name__)

Answering = Callable[[Scope, Reply], Awaitable[None]]
Taking = Callable[[bytes, Reply], Coroutine[Any, Any, None]]


class Only:
    """Lets some methods through to an application and answers 405 to the others."""

    def __init__(self, methods: Sequence[str], app: ASGIApp) -> None:
        self._methods = (*methods, "HEAD") if "GET" in methods else methods
        self._app = app
        self._refusing = Plain(self._refuse)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = scope["method"] in self._methods
        await (self._app if allowed else self._refusing)(scope, receive, send)

    async def _refuse(self, scope: Scope, reply: Reply) -> None:
        error = RequestError(
            405,
            f"{scope['path']} answers {self._methods[0]}, not {scope['method']}",
            code="method_not_allowed",
        )
        await reply.error(error, ((b"allow", ", ".join(self._methods).encode()),))


class Plain:
    """An application that answers at once, without reading a body."""

    def __init__(self, answer: Answering) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # a websocket; returning refuses it
        reply = Reply(send, request_id("req"), dialect_of(scope))
        try:
            reply.request_id = given_request_id(scope) or reply.request_id
            await self._answer(scope, reply)
        except RequestError as error:
            await reply.error(error)
        except Exception:
            log.exception("%s failed", scope["path"])
            await reply.error(internal_error())


class Reading:
    """An application that reads a body of at most `limit` bytes and answers it.

    The answer is broken off when its client leaves.
    """

    def __init__(self, limit: int, take: Taking) -> None:
        self._limit = limit
        self._take = take

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(scope: Scope, reply: Reply) -> None:
            try:
                body = await read_body(scope, receive, self._limit)
                await unless_gone(receive, self._take(body, reply))
            except ClientGoneError:
                log.debug("%s: the client left", reply.request_id)

        await Plain(answer)(scope, receive, send)


async def unknown_path(scope: Scope, reply: Reply) -> None:
    """Answer a path that is nowhere."""
    raise RequestError(
        404, f"there is no {scope['path']} here; /docs lists what there is", code="unknown_url"
    )
