"""What waits for the gate: operations that every rank runs in the same round.

They are values: what each asks for, with the call that is answered once it ran.
"""

from enum import IntEnum

from msgspec import Struct

from drumline.contract.internal_state import Adjustments
from drumline.contract.profile import ProfileAsked
from drumline.contract.weights import DiskWeights


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


class WeightsAsked(Struct, frozen=True):
    """A load of weights from disk."""

    call: int
    source: DiskWeights
    flush: bool
    """Whether the prefix caches are forgotten with the old weights."""
    version: str | None
    """What the new weights are called; None leaves the name as it is."""

    kind = Operation.UPDATE_WEIGHTS_FROM_DISK


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
