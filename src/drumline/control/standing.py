"""How an engine stands: whether it admits and forwards, and whether its memory is there.

Pure: `step` maps a state and an event to the next state and what the round must do. It
waits for nothing and knows no scheduler, queue or device.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from drumline.contract.regions import Region


class PauseMode(StrEnum):
    """What a pause does with the requests that run."""

    ABORT = "abort"  # end them, then stop
    WAIT = "wait"  # let them finish, then stop
    KEEP = "keep"  # stop at once, and keep them


# States. In all but the first, requests that arrive are withheld.


class Serving(Struct, frozen=True):
    """Requests are admitted, and run."""


class Draining(Struct, frozen=True):
    """What runs may finish; then the pause `call` is answered."""

    call: int


class Paused(Struct, frozen=True):
    """Nothing runs."""


class Kept(Struct, frozen=True):
    """Nothing moves, and what ran is kept."""


class Releasing(Struct, frozen=True):
    """What runs may finish; then regions are given back, and `call` is answered.

    While some are gone already, nothing can run, and there is nothing to finish.
    """

    call: int
    regions: tuple[Region, ...]
    gone: tuple[Region, ...] = ()
    paused: bool = False
    """Whether a pause was in force before."""
    drops: bool = False
    """Whether the weights are not kept."""
    dropped: bool = False
    """Whether there are none already."""


class Asleep(Struct, frozen=True):
    """Regions are gone, so nothing can run."""

    gone: tuple[Region, ...]
    dropped: bool = False
    """Whether the weights were not kept, and none have been loaded since."""


class Unloaded(Struct, frozen=True):
    """All memory is there, but nothing to compute with: the weights were dropped."""


class Lost(Struct, frozen=True):
    """No weights serve, and none can be loaded any more: nothing runs until the engine restarts."""

    fault: str
    gone: tuple[Region, ...] = ()


Living = Serving | Draining | Paused | Kept | Releasing | Asleep | Unloaded
State = Living | Lost

# Events


class PauseAsked(Struct, frozen=True):
    call: int
    mode: PauseMode


class ResumeAsked(Struct, frozen=True):
    call: int


class ReleaseAsked(Struct, frozen=True):
    """`regions` None are all."""

    call: int
    regions: tuple[Region, ...] | None = None
    drops: bool = False
    """Whether the weights are not to be kept."""


class WakeAsked(Struct, frozen=True):
    """`regions` None are all that are gone."""

    call: int
    regions: tuple[Region, ...] | None = None


class Drained(Struct, frozen=True):
    """Nothing runs any more."""


class Released(Struct, frozen=True):
    """The regions that were to be given back are gone, or, with a `fault`, all are there."""

    fault: str | None = None


class WeightsLoaded(Struct, frozen=True):
    """Every weight is one that was loaded."""


class WeightsLost(Struct, frozen=True):
    """The weights that served were discarded, and others could not be loaded."""

    fault: str


Event = (
    PauseAsked
    | ResumeAsked
    | ReleaseAsked
    | WakeAsked
    | Drained
    | Released
    | WeightsLoaded
    | WeightsLost
)

# Effects


class AbortAll(Struct, frozen=True):
    """End every request, and say so to its client."""


class CancelUnscheduled(Struct, frozen=True):
    """End the requests that the scheduler does not hold yet."""


class Restore(Struct, frozen=True):
    """Take regions back, before anything else happens."""

    regions: tuple[Region, ...]


class Reply(Struct, frozen=True):
    """Answer a call."""

    call: int
    success: bool
    message: str = ""


Effect = AbortAll | CancelUnscheduled | Restore | Reply
Step = tuple[State, tuple[Effect, ...]]

UNLOADED = (
    "the weights were dropped, and none are loaded; call update_weights_from_disk, "
    "once their memory is there"
)
"""Why nothing can run meanwhile."""


def step(state: State, event: Event) -> Step:
    """Return what follows from an event."""
    if isinstance(state, Lost):
        if isinstance(event, PauseAsked | ResumeAsked | ReleaseAsked | WakeAsked):
            return state, (Reply(event.call, False, state.fault),)
        return state, ()
    match event:
        case PauseAsked(call=call, mode=mode):
            return _pause(state, call, mode)
        case ResumeAsked(call=call):
            return _resume(state, call)
        case ReleaseAsked(call=call, regions=regions, drops=drops):
            return _release(state, call, tuple(Region) if regions is None else regions, drops)
        case WakeAsked(call=call, regions=regions):
            return _wake(state, call, gone(state) if regions is None else regions)
        case Drained():
            if isinstance(state, Draining):
                return Paused(), (Reply(state.call, True),)
            return state, ()
        case Released(fault=fault):
            return _released(state, fault)
        case WeightsLoaded():
            return _loaded(state), ()
        case WeightsLost(fault=fault):
            ended = (CancelUnscheduled(), AbortAll())
            lost = Lost(fault, gone(state))
            if isinstance(state, Draining | Releasing):
                return lost, (*ended, Reply(state.call, False, fault))
            return lost, ended
    assert_never(event)


def gone(state: State) -> tuple[Region, ...]:
    """Return the regions that are given back."""
    return state.gone if isinstance(state, Releasing | Asleep | Lost) else ()


def dropped(state: State) -> bool:
    """Whether the weights were not kept, and none have been loaded since."""
    if isinstance(state, Releasing | Asleep):
        return state.dropped
    return isinstance(state, Unloaded)


def lacking(state: State) -> bool:
    """Whether a forward would find no weights, or no memory."""
    return dropped(state) or bool(gone(state))


def frozen(state: State) -> bool:
    """Whether no forward may run."""
    return isinstance(state, Kept | Lost) or lacking(state)


def _pause(state: Living, call: int, mode: PauseMode) -> Step:
    if isinstance(state, Draining | Releasing):
        return state, (Reply(call, False, _busy(state)),)
    if isinstance(state, Asleep):
        held = _named(state.gone)
        return state, (Reply(call, False, f"memory is released ({held}), so nothing runs"),)
    if isinstance(state, Unloaded):
        return state, (Reply(call, False, UNLOADED),)
    match mode:
        case PauseMode.KEEP:
            return Kept(), (Reply(call, True),)
        case PauseMode.WAIT:
            return Draining(call), (CancelUnscheduled(),)
        case PauseMode.ABORT:
            return Draining(call), (CancelUnscheduled(), AbortAll())
    assert_never(mode)


def _resume(state: Living, call: int) -> Step:
    if away := gone(state):
        reason = f"memory is released ({_named(away)}); call resume_memory_occupation first"
        return state, (Reply(call, False, reason),)
    if dropped(state):
        return state, (Reply(call, False, UNLOADED),)
    match state:
        case Draining(call=waiting):
            stopped = Reply(waiting, False, "resumed before the pause drained")
            return Serving(), (stopped, Reply(call, True))
        case Releasing(call=waiting):
            stopped = Reply(waiting, False, "resumed before the release drained")
            return Serving(), (stopped, Reply(call, True))
        case _:
            return Serving(), (Reply(call, True),)


def _release(state: Living, call: int, regions: tuple[Region, ...], drops: bool) -> Step:
    away = gone(state)
    if again := [region for region in regions if region in away]:
        return state, (Reply(call, False, f"already released: {_named(again)}"),)
    if not regions:
        return state, (Reply(call, False, f"no tag was named; there are {_named(Region)}"),)
    if drops and Region.WEIGHTS not in regions:
        reason = f"to drop the weights is to release them; the tags name {_named(regions)} alone"
        return state, (Reply(call, False, reason),)
    match state:
        case Draining() | Releasing():
            return state, (Reply(call, False, _busy(state)),)
        case Kept():
            # To drain would run what is kept, and to wake up would end the pause.
            reason = (
                "paused with mode keep; call resume_scheduler, or pause with mode wait or abort"
            )
            return state, (Reply(call, False, reason),)
        case Serving() | Paused() | Asleep() | Unloaded():
            paused, absent = isinstance(state, Paused), dropped(state)
            releasing = Releasing(call, regions, away, paused, drops, absent)
            return releasing, (CancelUnscheduled(),)
    assert_never(state)


def _wake(state: Living, call: int, regions: tuple[Region, ...]) -> Step:
    away = gone(state)
    if absent := [region for region in regions if region not in away]:
        return state, (Reply(call, False, f"not released: {_named(absent)}"),)
    if not regions:
        # Whatever drains goes on draining, and a pause stays one.
        return state, (Reply(call, True),)
    left = tuple(region for region in away if region not in regions)
    effects = (Restore(regions), Reply(call, True))
    if isinstance(state, Releasing):
        return replace(state, gone=left), effects
    return _resting(left, dropped(state)), effects


def _released(state: Living, fault: str | None) -> Step:
    if not isinstance(state, Releasing):
        return state, ()
    if fault is None:
        away = tuple(region for region in Region if region in state.gone + state.regions)
        return Asleep(away, state.drops or state.dropped), (Reply(state.call, True),)
    effects = (Reply(state.call, False, f"nothing was released: {fault}"),)
    before = Paused() if state.paused else _resting(state.gone, state.dropped)
    return before, effects


def _loaded(state: Living) -> Living:
    match state:
        case Releasing():
            return replace(state, dropped=False)
        case Asleep() | Unloaded():
            return _resting(gone(state), False)
        case Serving() | Draining() | Paused() | Kept():
            return state
    assert_never(state)


def _resting(away: tuple[Region, ...], absent: bool) -> Living:
    """Return how an engine stands that nobody paused, without memory and weights as told."""
    if away:
        return Asleep(away, absent)
    return Unloaded() if absent else Serving()


def _busy(state: Draining | Releasing) -> str:
    what = "a pause" if isinstance(state, Draining) else "a release of memory"
    return f"{what} is already in progress"


def _named(regions: Sequence[Region] | type[Region]) -> str:
    return ", ".join(regions)
