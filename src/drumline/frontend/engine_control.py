"""What operators ask of all engines at once, and how their answers become one.

Every engine of a group gets every operation, all in one order, and none has done it until
all have. It knows no HTTP.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from drumline.contract.profile import ProfileAsked
from drumline.core.clock import SystemClock
from drumline.core.errors import PeerError, RequestError
from drumline.frontend.engine_link import EngineLink
from drumline.frontend.web.errors import as_request_error
from drumline.wire.control import YES
from drumline.wire.output import ControlReplySlim
from drumline.wire.progress import PROGRESS, Progress, decode_progress

_FROM_DISK = "update_weight_from_disk"


class Outcome(Struct, frozen=True):
    """What became of an operation; `message` says why it was refused, or what was done."""

    success: bool
    message: str = ""


class Control(Protocol):
    """How engines are steered, by whichever process holds the link to them."""

    @property
    def serving_s(self) -> float: ...

    async def pause(self, mode: str) -> Outcome: ...

    async def resume(self) -> Outcome: ...

    async def paused(self) -> bool: ...

    async def release(self, tags: list[str] | None, *, drops: bool = False) -> Outcome: ...

    async def wake(self, tags: list[str] | None) -> Outcome: ...

    async def sleeping(self) -> bool: ...

    async def load_weights(
        self, method: str, args: Sequence[Any], *, version: str | None, abort: bool, rests: bool
    ) -> Outcome: ...

    async def join_weight_group(self, *args: Any) -> Outcome: ...

    async def leave_weight_group(self, name: str) -> Outcome: ...

    async def rename_weights(self, version: str) -> Outcome: ...

    async def weight_version(self) -> str: ...

    async def weight_rows(self, name: str, count: int) -> Raw: ...

    async def progress(self, timeout_s: float) -> tuple[Progress | None, ...]: ...

    async def states(self) -> list[Raw]: ...

    async def adjust(self, settings: dict[str, Any]) -> Outcome | Raw: ...

    async def start_profile(self, asked: ProfileAsked) -> Outcome: ...

    async def stop_profile(self) -> Outcome: ...

    async def flush(self) -> Outcome: ...


class EngineControl:
    """The control operations of a group of engines. Thread: the event loop's."""

    def __init__(self, engine: EngineLink, timeout_s: float, clock: SystemClock) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._clock = clock
        self._loading = asyncio.Lock()
        self._loads = 0
        self._held = False
        self._serving_since_us: int | None = clock.now_us()

    @property
    def serving_s(self) -> float:
        """Seconds for which requests have waited for no operator, as far as this end knows."""
        since = self._serving_since_us
        return 0.0 if since is None else (self._clock.now_us() - since) / 1e6

    def _note(self, withholding: bool) -> None:
        if withholding:
            self._serving_since_us = None
        elif self._serving_since_us is None:
            self._serving_since_us = self._clock.now_us()

    async def pause(self, mode: str) -> Outcome:
        """Stop admitting requests; answered once the engines came to rest in that way."""
        while True:
            loads = self._loads
            outcome = await self._pause(mode)
            self._held |= outcome.success
            # A load that ended meanwhile may have gone on with what this stopped.
            if loads == self._loads or not outcome.success:
                return outcome

    async def _pause(self, mode: str) -> Outcome:
        # From now on, as a pause that drains is in force long before its answer.
        self._note(True)
        outcome = await self._asked("pause_scheduler", mode)
        if not outcome.success:
            await self.paused()
        return outcome

    async def resume(self) -> Outcome:
        """Go on with what was kept, then with what was withheld."""
        outcome = await self._asked("resume_scheduler")
        if outcome.success:
            self._note(False)
            self._held = False
        return outcome

    async def paused(self) -> bool:
        """Whether any engine withholds requests."""
        paused = _any_says_true(await self._replies("is_scheduler_paused"))
        self._note(paused)
        return paused

    async def release(self, tags: list[str] | None, *, drops: bool = False) -> Outcome:
        """Let what runs finish, then give memory back; all of it that can be by default.

        With `drops`, nothing is kept of the weights, and others have to be loaded afterwards.
        """
        self._note(True)
        asked = (tags, True) if drops else (tags,)
        outcome = await self._asked("release_memory_occupation", *asked)
        if not outcome.success:
            await self.paused()
        elif drops:
            self._engine.unloaded = True
        return outcome

    async def wake(self, tags: list[str] | None) -> Outcome:
        """Take memory back, by default all that is gone; once none is, the engines serve."""
        outcome = await self._asked("resume_memory_occupation", tags)
        await self.paused()
        return outcome

    async def sleeping(self) -> bool:
        """Whether memory of any engine is given back."""
        return _any_says_true(await self._replies("is_sleeping"))

    async def load_weights(
        self, method: str, args: Sequence[Any], *, version: str | None, abort: bool, rests: bool
    ) -> Outcome:
        """Have all engines serve other weights, or none: `method` with its `args` says which.

        Unless the engine is paused already, it is for as long as that takes, so that no answer
        is of both: what runs is finished before, or ended with `abort`. If it `rests`, it stays
        paused once they are loaded, as it does where an operator pauses it meanwhile.
        """
        async with self._loading:
            self._held = await self.paused()
            if not self._held:
                rested = await self._pause("abort" if abort else "wait")
                if not rested.success:
                    return rested
            try:
                loaded = await self._asked(method, *args)
                if not loaded.success:
                    # It may have left nothing to serve with.
                    lost = await self._asked("lost_weights")
                    self._engine.weights_lost = (lost.message or None) if lost.success else None
                    return loaded
                if version is not None:
                    self._engine.weight_version = version
                if method == _FROM_DISK:
                    self._engine.weight_path = args[0]
                self._held |= rests
                if self._engine.unloaded:
                    told = await self._replies("is_unloaded")
                    self._engine.unloaded = _any_says_true(told)
                    await self.paused()
                return loaded
            finally:
                self._loads += 1
                if not self._held:
                    await self.resume()

    async def join_weight_group(self, *args: Any) -> Outcome:
        """Have all ranks join a trainer's group, or none."""
        return await self._asked("init_weights_update_group", *args)

    async def leave_weight_group(self, name: str) -> Outcome:
        """Have all ranks leave a group."""
        return await self._asked("destroy_weights_update_group", name)

    async def rename_weights(self, version: str) -> Outcome:
        """Call the weights that serve something else."""
        renamed = await self._asked("update_weight_version", version)
        if renamed.success:
            self._engine.weight_version = version
        return renamed

    async def weight_version(self) -> str:
        """Return what the weights that serve are called. Raises RequestError 501."""
        told = await self._asked("get_weight_version")
        if not told.success:
            raise RequestError(501, told.message, code="unsupported")
        return told.message

    async def weight_rows(self, name: str, count: int) -> Raw:
        """Return a weight's first rows, of each engine where there are several.

        Raises RequestError 400 with an engine's reason.
        """
        replies = await self._replies("get_weights_by_name", name, count)
        for reply in replies:
            if not reply.success:
                reason = reply.message or "the engine tells no weights"
                raise RequestError(400, reason, param="name", code="invalid_parameter")
        told = [reply.message or "[]" for reply in replies]
        return Raw((told[0] if len(told) == 1 else f"[{','.join(told)}]").encode())

    async def progress(self, timeout_s: float) -> tuple[Progress | None, ...]:
        """Return where each engine is, as its end of the link says; None where it does not.

        Nothing, where one of them says no word within the time.
        """
        try:
            replies = await self._engine.call(PROGRESS, timeout_s=timeout_s)
        except PeerError:
            return ()
        return tuple(decode_progress(reply.message) for reply in replies)

    async def states(self) -> list[Raw]:
        """Return how each engine stands. Raises RequestError 501 where one cannot say."""
        replies = await self._replies("get_internal_state")
        if not all(reply.success for reply in replies):
            raise RequestError(501, _joined(replies).message, code="unsupported")
        return [Raw((reply.message or "{}").encode()) for reply in replies]

    async def adjust(self, settings: dict[str, Any]) -> Outcome | Raw:
        """Change settings of all engines in one round, or of none; returns what they are now."""
        replies = await self._replies("set_internal_state", settings)
        outcome = _joined(replies)
        return Raw((replies[0].message or "{}").encode()) if outcome.success else outcome

    async def start_profile(self, asked: ProfileAsked) -> Outcome:
        """Record what the ranks do, all of them or none."""
        if asked.profile_id is None:
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self._clock.wall_s()))
            asked = replace(asked, profile_id=stamp)
        return await self._asked("start_profile", msgspec.to_builtins(asked))

    async def stop_profile(self) -> Outcome:
        """End that, and have every rank write what it recorded."""
        return await self._asked("stop_profile")

    async def flush(self) -> Outcome:
        """Forget every cached prefix, on all engines or on none."""
        return await self._asked("flush_cache")

    async def _asked(self, method: str, *args: Any) -> Outcome:
        return _joined(await self._replies(method, *args))

    async def _replies(self, method: str, *args: Any) -> Sequence[ControlReplySlim]:
        """Raises RequestError 503 where an engine is gone or says nothing for too long."""
        try:
            return await self._engine.call(method, *args, timeout_s=self._timeout_s)
        except PeerError as error:
            # Whatever it was asked, nobody knows that it rests: its silence counts again.
            self._note(False)
            if self._engine.closed.is_set():
                raise as_request_error(error) from error
            raise RequestError(503, str(error), code="engine_silent") from error


def _joined(replies: Sequence[ControlReplySlim]) -> Outcome:
    """Return what the engines said together: yes if all did, and each thing said once."""
    said = dict.fromkeys(reply.message for reply in replies if reply.message)
    return Outcome(all(reply.success for reply in replies), " | ".join(said))


def _any_says_true(replies: Sequence[ControlReplySlim]) -> bool:
    return any(reply.success and reply.message == YES for reply in replies)
