"""The routes by which operators steer the engine, under the names of several engines."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal, TypeVar

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

    def asking(fields: type[T], run: Callable[[T], Coroutine[Any, Any, Struct]]) -> ASGIApp:
        return Operation(service.server.max_body_bytes, service.operations, fields, run)

    async def paused(_: Nothing) -> _Paused:
        return _Paused(await control.paused())

    async def sleeping(_: Nothing) -> _Sleeping:
        return _Sleeping(await control.sleeping())

    async def sleep(asked: _Sleep) -> Outcome:
        drops = asked.level == _DROPS
        if asked.mode != "abort":
            return await control.release(asked.tags, drops=drops)
        paused = await control.paused()
        ended = await control.pause("abort")
        if not ended.success:
            return ended
        outcome = await control.release(asked.tags, drops=drops)
        if not outcome.success and not paused:
            await control.resume()
        return outcome

    async def world(asked: _WorldAsked) -> _World:
        parallel = service.config.parallel
        replicas = 1 if asked.include_dp else parallel.data_parallel_size
        return _World(parallel.world_size // replicas)

    async def states(_: Nothing) -> _States:
        return _States(await control.states())

    async def adjust(asked: _State) -> Outcome | _Adjusted:
        adjusted = await control.adjust(asked.server_args)
        return adjusted if isinstance(adjusted, Outcome) else _Adjusted(True, adjusted)

    pause, flush = _Pausing(control), _Flushing(control)
    wake = asking(_Tags, lambda asked: control.wake(asked.tags))
    resume = asking(_Resume, lambda _: control.resume())
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
        ("GET", "/get_world_size", asking(_WorldAsked, world)),
        ("GET POST", "/flush_cache", asking(_Flush, flush.trying)),
        ("GET POST", "/get_internal_state", asking(Nothing, states)),
        ("POST", "/set_internal_state", asking(_State, adjust)),
        ("GET POST", "/start_profile", asking(ProfileAsked, control.start_profile)),
        ("GET POST", "/stop_profile", asking(Nothing, lambda _: control.stop_profile())),
        *(("GET POST", path, Plain(_absent)) for path in _ABSENT),
        ("POST", "/reset_prefix_cache", asking(_Reset, flush.once)),
        *weight_routes(service),
    ]


async def _absent(scope: Scope, reply: Reply) -> None:
    raise RequestError(501, f"{scope['path']} is not supported by this version", code="unsupported")


class _Pause(Struct, forbid_unknown_fields=True):
    mode: str | None = None
    wait_for_inflight_requests: bool | None = None
    """The older way to say the mode `wait`."""
    clear_cache: bool | None = None


class _Resume(Struct, forbid_unknown_fields=True):
    torch_empty_cache: bool = True
    """What SGLang's clients may say, and changes nothing here."""


_TRIES_S = 0.05
_LONGEST_S = 600


class _Flush(Struct, forbid_unknown_fields=True):
    timeout: Annotated[float, Meta(ge=0, le=_LONGEST_S)] = 0.0
    """Seconds for which a flush that is refused is tried again."""


class _Reset(Struct, forbid_unknown_fields=True):
    reset_running_requests: bool = False
    reset_external: bool = False
    """Prefixes in other tiers are forgotten in any case."""


class _Flushing:
    """Flushes; the two names differ in what may be said besides."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def trying(self, asked: _Flush) -> Outcome:
        clock = asyncio.get_running_loop().time
        end = clock() + asked.timeout
        while True:
            outcome = await self._control.flush()
            if outcome.success or clock() >= end:
                return outcome
            # What holds pages may end meanwhile.
            await asyncio.sleep(_TRIES_S)

    async def once(self, asked: _Reset) -> Outcome:
        if asked.reset_running_requests:
            raise RequestError(
                501,
                "prefixes that running requests hold stay; end or finish those before, with /pause",
                param="reset_running_requests",
                code="unsupported",
            )
        return await self._control.flush()


_MODES = {"in_place": "keep"}
"""Modes by the names of other engines."""


class _Pausing:
    """Pauses; the two names differ in what is done where no mode is given."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def ending(self, asked: _Pause) -> Outcome:
        return await self._pause(asked, "abort")

    async def finishing(self, asked: _Pause) -> Outcome:
        return await self._pause(asked, "wait")

    async def _pause(self, asked: _Pause, unsaid: str) -> Outcome:
        told = "wait" if asked.wait_for_inflight_requests else unsaid
        mode = _MODES.get(asked.mode or told, asked.mode or told)
        paused = await self._control.pause(mode)
        # What is kept reads the pages that it has.
        if not paused.success or not asked.clear_cache or mode == "keep":
            return paused
        return await self._control.flush()


class _Paused(Struct, frozen=True):
    is_paused: bool


class _Tags(Struct, forbid_unknown_fields=True):
    tags: list[str] | None = None


_DROPS = 2
"""The level of sleep at which no weights are kept."""


class _Sleep(_Tags, forbid_unknown_fields=True):
    level: Annotated[int, Meta(ge=1, le=_DROPS)] = 1
    mode: Literal["abort", "wait"] | None = None
    """What becomes of the requests that run; they finish by default."""


class _Sleeping(Struct, frozen=True):
    is_sleeping: bool


class _WorldAsked(Struct, forbid_unknown_fields=True):
    include_dp: bool = True


class _World(Struct, frozen=True):
    world_size: int
    """Ranks, as a trainer's group counts them: of all replicas, or of one."""


class _State(Struct, forbid_unknown_fields=True):
    server_args: dict[str, Any]


class _Adjusted(Struct, frozen=True):
    updated: bool
    server_args: Raw


class _States(Struct, frozen=True):
    internal_states: list[Raw]
    """By engine."""
