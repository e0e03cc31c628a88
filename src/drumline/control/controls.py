"""The control operations: which are asked for, what they mean, how each is answered.

An operation that every rank must run in the same round waits here until the round's
gate takes it; a pause or a release that drains waits for the round to say that it has.
It runs nothing itself and knows no scheduler.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from drumline.contract.internal_state import Adjustments
from drumline.contract.messages import CallAsked, CallReply
from drumline.contract.profile import ProfileAsked
from drumline.contract.regions import Region
from drumline.control.operations import (
    Done,
    Gated,
    ProfileStart,
    ProfileStop,
    StateSet,
    WeightsAsked,
)
from drumline.control.standing import (
    UNLOADED,
    Drained,
    Draining,
    Effect,
    Event,
    Lost,
    PauseAsked,
    PauseMode,
    ReleaseAsked,
    Released,
    Releasing,
    Reply,
    ResumeAsked,
    Serving,
    State,
    WakeAsked,
    WeightsLoaded,
    WeightsLost,
    dropped,
    frozen,
    gone,
    lacking,
    step,
)
from drumline.control.weight_calls import (
    METHODS,
    CallRefusedError,
    RowsAsked,
    operation,
    rows_asked,
    version_asked,
)
from drumline.core.errors import quoted

_Effects = tuple[Effect, ...]
_ADJUSTABLE = Adjustments.__struct_fields__


class Controls:
    """Operations that wait for their gate or drain, and answers that wait for the round's end."""

    def __init__(self, weight_version: str = "default") -> None:
        self._state: State = Serving()
        self._flushes: list[int] = []
        self._replies: list[CallReply] = []
        self._curious: list[int] = []
        self._watching: list[int] = []
        self._gated: deque[Gated] = deque()
        self._rows: list[RowsAsked] = []
        self._weight_version = weight_version
        self._methods: dict[str, Callable[[CallAsked], _Effects]] = {
            "cache_state": self._cache_state,
            "flush_cache": self._flush_cache,
            "get_internal_state": self._get_internal_state,
            "get_weight_version": self._get_weight_version,
            "get_weights_by_name": self._get_weights_by_name,
            "is_scheduler_paused": self._is_scheduler_paused,
            "is_sleeping": self._is_sleeping,
            "is_unloaded": self._is_unloaded,
            "lost_weights": lambda call: self._reply(call, True, self.lost or ""),
            "pause_scheduler": self._pause_scheduler,
            "release_memory_occupation": self._release_memory,
            "resume_memory_occupation": self._resume_memory,
            "resume_scheduler": self._resume_scheduler,
            "set_internal_state": self._set_internal_state,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
            "update_weight_version": self._update_weight_version,
            **dict.fromkeys(METHODS, self._operate),
        }

    def ask(self, call: CallAsked) -> _Effects:
        """Take an operation in, and return what must happen now.

        One that waits for nothing is answered at the round's end.
        """
        method = self._methods.get(call.method)
        if method is not None:
            return method(call)
        known = ", ".join(self._methods)
        return self._reply(
            call, False, f"this engine has no operation {quoted(call.method)}; it has {known}"
        )

    @property
    def withholding(self) -> bool:
        """Whether requests that arrive are kept from the scheduler."""
        return not isinstance(self._state, Serving)

    @property
    def frozen(self) -> bool:
        """Whether no forward may run."""
        return frozen(self._state)

    @property
    def draining(self) -> bool:
        """Whether a pause waits until nothing runs."""
        return isinstance(self._state, Draining)

    @property
    def releasing(self) -> tuple[Region, ...]:
        """The regions that are to be given back once nothing runs."""
        return self._state.regions if isinstance(self._state, Releasing) else ()

    @property
    def drops(self) -> bool:
        """Whether the weights among them are not kept."""
        return isinstance(self._state, Releasing) and self._state.drops

    @property
    def lacking(self) -> bool:
        """Whether a forward would find no weights, or no memory."""
        return lacking(self._state)

    @property
    def refusing(self) -> str | None:
        """Why requests that arrive are refused, if so: there is nothing to wait for."""
        if isinstance(self._state, Lost):
            return self._state.fault
        return UNLOADED if dropped(self._state) else None

    @property
    def gone(self) -> tuple[Region, ...]:
        """The regions that are given back."""
        return gone(self._state)

    def drained(self) -> None:
        """Answer the pause that waited for this."""
        self._step(Drained())

    def released(self, fault: str | None) -> None:
        """Answer the release that waited for this; with a `fault`, nothing was given back."""
        self._step(Released(fault))

    @property
    def flush_wanted(self) -> bool:
        """Whether a cache flush waits for the gate."""
        return bool(self._flushes)

    def flushed(self, success: bool) -> None:
        """Answer the flushes that waited."""
        message = "" if success else "the cache is in use; retry once the running requests ended"
        self._replies += [CallReply(call_id, success, message) for call_id in self._flushes]
        self._flushes.clear()

    @property
    def gated(self) -> Gated | None:
        """The operation that waits for the gate next."""
        return self._gated[0] if self._gated else None

    def ran(self, done: Done) -> _Effects:
        """Answer that operation, which ran; where weights were lost, all that wait, too."""
        asked = self._gated.popleft()
        if done.success and isinstance(asked, WeightsAsked) and asked.version is not None:
            self._weight_version = asked.version
        self._replies.append(CallReply(asked.call, done.success, done.message))
        if done.success and done.whole:
            self._step(WeightsLoaded())
        lost = done.lost
        if lost is None:
            return ()
        # Nothing that still waits can be done.
        waiting = [each.call for each in self._gated] + [each.call for each in self._rows]
        self._replies += [CallReply(call, False, lost) for call in waiting]
        self._gated.clear()
        self._rows.clear()
        return self._step(WeightsLost(lost))

    @property
    def lost(self) -> str | None:
        """Why no weights serve any more."""
        return self._state.fault if isinstance(self._state, Lost) else None

    def take_rows(self) -> list[RowsAsked]:
        """Return which weights are to be told, once."""
        rows, self._rows = self._rows, []
        return rows

    def told(self, asked: RowsAsked, done: Done) -> None:
        """Answer who wanted to see a weight."""
        self._replies.append(CallReply(asked.call, done.success, done.message))

    @property
    def cache_state_wanted(self) -> bool:
        """Whether somebody wants to know where the pages are."""
        return bool(self._curious)

    def cache_state(self, state: str) -> None:
        """Answer those who wanted to know."""
        self._replies += [CallReply(call_id, True, state) for call_id in self._curious]
        self._curious.clear()

    @property
    def state_wanted(self) -> bool:
        """Whether somebody wants to know how this rank stands."""
        return bool(self._watching)

    def told_state(self, state: str) -> None:
        """Answer those who wanted to know."""
        self._replies += [CallReply(call_id, True, state) for call_id in self._watching]
        self._watching.clear()

    @property
    def standing(self) -> str:
        """How this rank stands, in a word."""
        return type(self._state).__name__.lower()

    @property
    def weight_version(self) -> str:
        """What the weights that serve are called."""
        return self._weight_version

    def take_replies(self) -> list[CallReply]:
        """Return the answers that are due, once."""
        replies, self._replies = self._replies, []
        return replies

    def _reply(self, call: CallAsked, success: bool, message: str = "") -> _Effects:
        self._replies.append(CallReply(call.call_id, success, message))
        return ()

    def _step(self, event: Event) -> _Effects:
        """Return the effects of an event but for its answers, which are kept for the end."""
        self._state, effects = step(self._state, event)
        self._replies += [
            CallReply(effect.call, effect.success, effect.message)
            for effect in effects
            if isinstance(effect, Reply)
        ]
        return tuple(effect for effect in effects if not isinstance(effect, Reply))

    # One method for each operation.

    def _cache_state(self, call: CallAsked) -> _Effects:
        self._curious.append(call.call_id)
        return ()

    def _flush_cache(self, call: CallAsked) -> _Effects:
        self._flushes.append(call.call_id)
        return ()

    def _is_scheduler_paused(self, call: CallAsked) -> _Effects:
        return self._reply(call, True, "true" if self.withholding else "false")

    def _is_sleeping(self, call: CallAsked) -> _Effects:
        return self._reply(call, True, "true" if self.gone else "false")

    def _is_unloaded(self, call: CallAsked) -> _Effects:
        return self._reply(call, True, "true" if dropped(self._state) else "false")

    def _pause_scheduler(self, call: CallAsked) -> _Effects:
        asked = _argument(call, "mode") or PauseMode.ABORT
        if asked not in tuple(PauseMode):
            modes = ", ".join(PauseMode)
            return self._reply(
                call, False, f"invalid pause mode {quoted(asked)}; it is one of {modes}"
            )
        return self._step(PauseAsked(call.call_id, PauseMode(asked)))

    def _resume_scheduler(self, call: CallAsked) -> _Effects:
        return self._step(ResumeAsked(call.call_id))

    def _get_weight_version(self, call: CallAsked) -> _Effects:
        return self._reply(call, True, self._weight_version)

    def _get_weights_by_name(self, call: CallAsked) -> _Effects:
        if self.lost is not None:
            return self._reply(call, False, self.lost)
        try:
            self._rows.append(rows_asked(call))
        except CallRefusedError as error:
            return self._reply(call, False, str(error))
        return ()

    def _update_weight_version(self, call: CallAsked) -> _Effects:
        try:
            self._weight_version = version_asked(call)
        except CallRefusedError as error:
            return self._reply(call, False, str(error))
        return self._reply(call, True, f"the weights are called {self._weight_version}")

    def _operate(self, call: CallAsked) -> _Effects:
        if self.lost is not None:
            return self._reply(call, False, self.lost)
        try:
            self._gated.append(operation(call))
        except CallRefusedError as error:
            return self._reply(call, False, str(error))
        return ()

    def _get_internal_state(self, call: CallAsked) -> _Effects:
        self._watching.append(call.call_id)
        return ()

    def _set_internal_state(self, call: CallAsked) -> _Effects:
        given = call.args[0] if call.args else None
        # A gateway sends the body of its own route as it is.
        if isinstance(given, dict) and given.keys() == {"server_args"}:
            given = given["server_args"]
        try:
            changes = msgspec.convert(given, Adjustments)
        except msgspec.ValidationError as error:
            return self._reply(call, False, f"{error}; what may be set is {', '.join(_ADJUSTABLE)}")
        if changes == Adjustments():
            return self._reply(
                call, False, f"nothing is to be set; what may be is {', '.join(_ADJUSTABLE)}"
            )
        self._gated.append(StateSet(call.call_id, changes))
        return ()

    def _start_profile(self, call: CallAsked) -> _Effects:
        given = call.args[0] if call.args else None
        try:
            asked = msgspec.convert({} if given is None else given, ProfileAsked)
        except msgspec.ValidationError as error:
            return self._reply(
                call, False, f"{error}; it takes {', '.join(ProfileAsked.__struct_fields__)}"
            )
        self._gated.append(ProfileStart(call.call_id, asked))
        return ()

    def _stop_profile(self, call: CallAsked) -> _Effects:
        self._gated.append(ProfileStop(call.call_id))
        return ()

    def _release_memory(self, call: CallAsked) -> _Effects:
        regions = self._regions(call)
        if isinstance(regions, str):
            return ()
        drops = _argument(call, "drop_weights", 1) or False
        if not isinstance(drops, bool):
            return self._reply(call, False, f"drop_weights is true or false, not {quoted(drops)}")
        return self._step(ReleaseAsked(call.call_id, regions, drops))

    def _resume_memory(self, call: CallAsked) -> _Effects:
        regions = self._regions(call)
        return () if isinstance(regions, str) else self._step(WakeAsked(call.call_id, regions))

    def _regions(self, call: CallAsked) -> tuple[Region, ...] | str | None:
        """Return the regions that a call names in their order, None for none, or its refusal."""
        tags = _argument(call, "tags")
        if tags is None:
            return None
        known = list(Region)
        if not isinstance(tags, list | tuple) or any(tag not in known for tag in tags):
            refusal = f"invalid tags {quoted(tags)}; there are {', '.join(known)}"
            self._reply(call, False, refusal)
            return refusal
        return tuple(region for region in Region if region in tags)


def _argument(call: CallAsked, name: str, place: int = 0) -> Any:
    """Return a call's argument, which may stand in a map; None without one."""
    if call.args and isinstance(call.args[0], dict):
        return call.args[0].get(name)
    return call.args[place] if len(call.args) > place else None
