"""What waits for the gate: operations that every rank runs in the same round.

They are values: what each asks for, with the call that is answered once it ran.
"""

from enum import IntEnum

from msgspec import Struct

from drumline.contract.internal_state import Adjustments
from drumline.contract.profile import ProfileAsked
from drumline.contract.weights import DiskWeights, SentWeights


class Operation(IntEnum):
    """What a frontend may ask for that all replicas must do together. Only ever appended to."""

    INIT_WEIGHTS_GROUP = 1
    UPDATE_WEIGHTS_FROM_DISTRIBUTED = 2
    DESTROY_WEIGHTS_GROUP = 3
    UPDATE_WEIGHTS_FROM_MOONCAKE = 4
    REBALANCE_EXPERTS = 5
    UPDATE_WEIGHTS_FROM_DISK = 6
    UPDATE_WEIGHTS_FROM_TENSOR = 7
    START_PROFILE = 8
    STOP_PROFILE = 9
    SET_INTERNAL_STATE = 10


class TensorParts(Struct, frozen=True):
    """Safetensors files: one for all ranks of the engine, or one for each."""

    parts: tuple[bytes, ...]

    def __str__(self) -> str:
        return f"{sum(map(len, self.parts))} bytes of tensors"


class JoinGroup(Struct, frozen=True):
    """Have every rank join a trainer's group, from place `rank_offset` on."""

    address: str
    port: int
    rank_offset: int
    size: int
    name: str
    backend: str


class LeaveGroup(Struct, frozen=True):
    """Have every rank leave a group."""

    name: str


Work = DiskWeights | TensorParts | SentWeights | JoinGroup | LeaveGroup


class WeightsAsked(Struct, frozen=True):
    """An operation on weights."""

    call: int
    work: Work
    flush: bool = False
    """Whether the prefix caches are forgotten with the old weights."""
    version: str | None = None
    """What the new weights are called; None leaves the name as it is."""

    @property
    def kind(self) -> Operation:
        """What it is at the gate."""
        return _KINDS[type(self.work)]


_KINDS: dict[type[Struct], Operation] = {
    DiskWeights: Operation.UPDATE_WEIGHTS_FROM_DISK,
    TensorParts: Operation.UPDATE_WEIGHTS_FROM_TENSOR,
    SentWeights: Operation.UPDATE_WEIGHTS_FROM_DISTRIBUTED,
    JoinGroup: Operation.INIT_WEIGHTS_GROUP,
    LeaveGroup: Operation.DESTROY_WEIGHTS_GROUP,
}


class ProfileStart(Struct, frozen=True):
    """The begin of a profile."""

    call: int
    asked: ProfileAsked

    kind = Operation.START_PROFILE


class ProfileStop(Struct, frozen=True):
    """Its end."""

    call: int

    kind = Operation.STOP_PROFILE


class StateSet(Struct, frozen=True):
    """A change of settings."""

    call: int
    changes: Adjustments

    kind = Operation.SET_INTERNAL_STATE


Gated = WeightsAsked | ProfileStart | ProfileStop | StateSet


class Done(Struct, frozen=True):
    """What became of an operation."""

    success: bool
    message: str
    lost: str | None = None
    """Why no weights serve any more, if so."""
    whole: bool = False
    """Whether weights were loaded, and every weight is one that was."""
