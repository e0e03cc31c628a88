"""The routes by which operators steer the engine, under the names of several engines."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Raw, Struct
from starlette.types import ASGIApp, Scope

from drumline.contract.profile import ProfileAsked
from drumline.core.errors import RequestError
from drumline.frontend.engine_control import Control, Outcome
from drumline.frontend.operation import Nothing, Operation, Route
from drumline.frontend.service import Service
from drumline.frontend.web.reply import Reply
from drumline.frontend.web.routes import Plain
from drumline.frontend.weight_routes import weight_routes

T = TypeVar("T", bound=Struct)

_ABSENT = (
    "/update_weights_from_mooncake",
    "/rebalance_experts",
)
"""What clients of other engines ask for, and this one does not do."""


def control_routes(service: Service) -> list[Route]:
    """Return every route that changes what all clients meet, or tells how that stands."""
    control = service.control

    def asking(fields: type[T], run: Callable[[T], Awaitable[Struct]]) -> ASGIApp:
        return Operation(service.server.max_body_bytes, fields, run)

    async def paused(_: Nothing) -> _Paused:
        return _Paused(await control.paused())

    async def sleeping(_: Nothing) -> _Sleeping:
        return _Sleeping(await control.sleeping())

    async def sleep(asked: _Sleep) -> Outcome:
        return await control.release(asked.tags, drops=asked.level == _DROPS)

    async def states(_: Nothing) -> _States:
        return _States(await control.states())

    async def adjust(asked: _State) -> Outcome | _Adjusted:
        adjusted = await control.adjust(asked.server_args)
        return adjusted if isinstance(adjusted, Outcome) else _Adjusted(True, adjusted)

    pause = _Pausing(control)
    wake = asking(_Tags, lambda asked: control.wake(asked.tags))
    resume = asking(Nothing, lambda _: control.resume())
    flush = asking(Nothing, lambda _: control.flush())
    return [
        ("POST", "/pause", asking(_Pause, pause.ending)),
        ("POST", "/pause_generation", asking(_Pause, pause.finishing)),
        ("POST", "/resume", resume),
        ("POST", "/continue_generation", resume),
        ("GET", "/is_paused", asking(Nothing, paused)),
        ("POST", "/sleep", asking(_Sleep, sleep)),
        ("POST", "/release_memory_occupation", asking(_Tags, lambda a: control.release(a.tags))),
        ("POST", "/wake_up", wake),
        ("POST", "/resume_memory_occupation", wake),
        ("GET", "/is_sleeping", asking(Nothing, sleeping)),
        ("GET POST", "/flush_cache", flush),
        ("GET POST", "/get_internal_state", asking(Nothing, states)),
        ("POST", "/set_internal_state", asking(_State, adjust)),
        ("GET POST", "/start_profile", asking(ProfileAsked, control.start_profile)),
        ("GET POST", "/stop_profile", asking(Nothing, lambda _: control.stop_profile())),
        *(("GET POST", path, Plain(_absent)) for path in _ABSENT),
        ("POST", "/reset_prefix_cache", flush),
        *weight_routes(service),
    ]


async def _absent(scope: Scope, reply: Reply) -> None:
    raise RequestError(501, f"{scope['path']} is not supported by this version", code="unsupported")


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


_DROPS = 2
"""The level of sleep at which no weights are kept."""


class _Sleep(_Tags, forbid_unknown_fields=True):
    level: Annotated[int, Meta(ge=1, le=_DROPS)] = 1


class _Sleeping(Struct, frozen=True):
    is_sleeping: bool


class _State(Struct, forbid_unknown_fields=True):
    server_args: dict[str, Any]


class _Adjusted(Struct, frozen=True):
    updated: bool
    server_args: Raw


class _States(Struct, frozen=True):
    internal_states: list[Raw]
    """By engine."""
