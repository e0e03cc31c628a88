"""The routes by which operators steer the engine, under the names of several engines.

A body's fields may stand in the query as well. An operation that the engine refuses is
answered 400 with its reason, as `{"success": false, "message": …}`. It goes on to its end
whether or not its client waits for it.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw, Struct
from starlette.types import ASGIApp, Receive, Scope, Send

from drumline.contract.profile import ProfileAsked
from drumline.core.errors import RequestError
from drumline.frontend.engine_control import Control, Outcome
from drumline.frontend.service import Service
from drumline.frontend.web.incoming import ClientGoneError, decode_json, read_body
from drumline.frontend.web.reply import Reply
from drumline.frontend.web.routes import Plain

Route = tuple[str, str, ASGIApp]
"""Methods, path, and what answers there."""

T = TypeVar("T", bound=Struct)

_LISTS = {"tags", "activities"}
"""Fields that a query may name several times."""

_ABSENT = (
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_mooncake",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/get_weights_by_name",
    "/rebalance_experts",
)
"""What clients of other engines ask for, and this one does not do."""

_encode = msgspec.json.Encoder().encode
_decode_object = msgspec.json.Decoder(dict[str, Any])


def control_routes(service: Service) -> list[Route]:
    """Return every route that changes what all clients meet, or tells how that stands."""
    control = service.control

    def asking(fields: type[T], run: Callable[[T], Awaitable[Struct]]) -> ASGIApp:
        return _Operation(service.server.max_body_bytes, fields, run)

    async def paused(_: _Nothing) -> _Paused:
        return _Paused(await control.paused())

    async def sleeping(_: _Nothing) -> _Sleeping:
        return _Sleeping(await control.sleeping())

    async def sleep(asked: _Sleep) -> Outcome:
        if asked.level != 1:
            raise RequestError(
                501,
                f"level {asked.level} is not supported; level 1 gives back all memory of weights "
                "and KV cache, and keeps the weights in a file meanwhile",
                param="level",
            )
        return await control.release(asked.tags)

    async def load(asked: _Disk) -> Outcome:
        return await control.load_from_disk(
            asked.model_path,
            asked.load_format,
            asked.weight_version,
            flush=asked.flush_cache,
            abort=asked.abort_all_requests,
        )

    async def version(_: _Nothing) -> _Version:
        return _Version(await control.weight_version())

    async def states(_: _Nothing) -> _States:
        return _States(await control.states())

    async def adjust(asked: _State) -> Outcome | _Adjusted:
        adjusted = await control.adjust(asked.server_args)
        return adjusted if isinstance(adjusted, Outcome) else _Adjusted(True, adjusted)

    pause = _Pausing(control)
    wake = asking(_Tags, lambda asked: control.wake(asked.tags))
    resume = asking(_Nothing, lambda _: control.resume())
    flush = asking(_Nothing, lambda _: control.flush())
    return [
        ("POST", "/pause", asking(_Pause, pause.ending)),
        ("POST", "/pause_generation", asking(_Pause, pause.finishing)),
        ("POST", "/resume", resume),
        ("POST", "/continue_generation", resume),
        ("GET", "/is_paused", asking(_Nothing, paused)),
        ("POST", "/sleep", asking(_Sleep, sleep)),
        ("POST", "/release_memory_occupation", asking(_Tags, lambda a: control.release(a.tags))),
        ("POST", "/wake_up", wake),
        ("POST", "/resume_memory_occupation", wake),
        ("GET", "/is_sleeping", asking(_Nothing, sleeping)),
        ("POST", "/update_weights_from_disk", asking(_Disk, load)),
        ("GET", "/get_weight_version", asking(_Nothing, version)),
        ("GET POST", "/flush_cache", flush),
        ("GET POST", "/get_internal_state", asking(_Nothing, states)),
        ("POST", "/set_internal_state", asking(_State, adjust)),
        ("GET POST", "/start_profile", asking(ProfileAsked, control.start_profile)),
        ("GET POST", "/stop_profile", asking(_Nothing, lambda _: control.stop_profile())),
        *(("GET POST", path, Plain(_absent)) for path in _ABSENT),
        ("POST", "/reset_prefix_cache", flush),
    ]


class _Operation(Generic[T]):
    """An application that reads an operation's fields, runs it, and tells what became of it."""

    def __init__(self, limit: int, fields: type[T], run: Callable[[T], Awaitable[Struct]]) -> None:
        self._limit = limit
        self._fields = fields
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(scope: Scope, reply: Reply) -> None:
            try:
                body = await read_body(scope, receive, self._limit)
            except ClientGoneError:
                return
            told = await self._run(self._read(scope, body))
            refused = isinstance(told, Outcome) and not told.success
            await reply.body(_encode(told), status=400 if refused else 200)

        await Plain(answer)(scope, receive, send)

    def _read(self, scope: Scope, body: bytes) -> T:
        """Return the fields of body and query. Raises RequestError 400 naming what does not fit."""
        given = decode_json(body, _decode_object) if body.strip() else {}
        for name, values in parse_qs(scope["query_string"].decode("latin-1")).items():
            if name in given or (len(values) > 1 and name not in _LISTS):
                raise RequestError(400, f"{name} is given twice", param=name)
            given[name] = values if name in _LISTS else values[0]
        try:
            return msgspec.convert(given, self._fields, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(self._fields.__struct_fields__) or "no fields"
            raise RequestError(
                400, f"{error}; {scope['path']} takes {known}", code="invalid_parameter"
            ) from None


async def _absent(scope: Scope, reply: Reply) -> None:
    raise RequestError(501, f"{scope['path']} is not supported by this version", code="unsupported")


class _Nothing(Struct, forbid_unknown_fields=True):
    """Of operations that need no word."""


class _Pause(Struct, forbid_unknown_fields=True):
    mode: str | None = None


_MODES = {"in_place": "keep"}
"""Modes by the names of other engines."""


class _Pausing:
    """Pauses; the two names differ in what is done where no mode is given."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def ending(self, asked: _Pause) -> Outcome:
        return await self._pause(asked.mode or "abort")

    async def finishing(self, asked: _Pause) -> Outcome:
        return await self._pause(asked.mode or "wait")

    async def _pause(self, mode: str) -> Outcome:
        return await self._control.pause(_MODES.get(mode, mode))


class _Paused(Struct, frozen=True):
    is_paused: bool


class _Tags(Struct, forbid_unknown_fields=True):
    tags: list[str] | None = None


class _Sleep(_Tags, forbid_unknown_fields=True):
    level: int = 1


class _Sleeping(Struct, frozen=True):
    is_sleeping: bool


class _Disk(Struct, forbid_unknown_fields=True):
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class _State(Struct, forbid_unknown_fields=True):
    server_args: dict[str, Any]


class _Adjusted(Struct, frozen=True):
    updated: bool
    server_args: Raw


class _States(Struct, frozen=True):
    internal_states: list[Raw]
    """By engine."""


class _Version(Struct, frozen=True):
    weight_version: str
