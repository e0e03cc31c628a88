"""Control operations as structs of their own, of frontends that do not call by name.

Their replies carry no id: an engine answers operations of one kind in the order in
which they came. `call_of` and `reply_to` translate them from and to calls by name.
"""

import re
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal

import msgspec
from msgspec import Struct

from drumline.wire.codec import Buffer, decoder


# `type` is a field of one of them, so the tag needs another name; it shows in no encoding.
class _Operation(Struct, array_like=True, kw_only=True, tag_field="struct"):
    rid: str | None = None
    http_worker_ipc: str | None = None


class FlushCacheReqInput(_Operation, kw_only=True, tag=True):
    """Drop every cached prefix."""


class FlushCacheReqOutput(_Operation, kw_only=True, tag=True):
    success: bool


class PauseSchedulerReqInput(_Operation, kw_only=True, tag=True):
    mode: Literal["abort", "wait", "keep"] = "abort"


class PauseSchedulerReqOutput(_Operation, kw_only=True, tag=True):
    success: bool
    message: str = ""


class ResumeSchedulerReqInput(_Operation, kw_only=True, tag=True):
    pass


class ResumeSchedulerReqOutput(_Operation, kw_only=True, tag=True):
    success: bool
    message: str = ""


class IsSchedulerPausedReqInput(_Operation, kw_only=True, tag=True):
    pass


class IsSchedulerPausedReqOutput(_Operation, kw_only=True, tag=True):
    is_paused: bool


class UpdateWeightFromDiskReqInput(_Operation, kw_only=True, tag=True):
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None


class UpdateWeightFromDiskReqOutput(_Operation, kw_only=True, tag=True):
    success: bool
    message: str
    num_paused_requests: int | None = 0


class UpdateWeightsFromDistributedReqInput(_Operation, kw_only=True, tag=True):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    weight_version: str | None


class UpdateWeightsFromDistributedReqOutput(_Operation, kw_only=True, tag=True):
    success: bool
    message: str


class UpdateWeightsFromTensorReqInput(_Operation, kw_only=True, tag=True):
    serialized_named_tensors: list[bytes]
    load_format: str | None
    flush_cache: bool
    weight_version: str | None = None


class UpdateWeightsFromTensorReqOutput(_Operation, kw_only=True, tag=True):
    success: bool
    message: str


class InitWeightsUpdateGroupReqInput(_Operation, kw_only=True, tag=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class InitWeightsUpdateGroupReqOutput(_Operation, kw_only=True, tag=True):
    success: bool
    message: str


class DestroyWeightsUpdateGroupReqInput(_Operation, kw_only=True, tag=True):
    group_name: str = "weight_update_group"


class DestroyWeightsUpdateGroupReqOutput(_Operation, kw_only=True, tag=True):
    success: bool
    message: str


class UpdateWeightsFromMooncakeReqInput(_Operation, kw_only=True, tag=True):
    version: int
    flush_cache: bool
    weight_version: str | None


class UpdateWeightsFromMooncakeReqOutput(_Operation, kw_only=True, tag=True):
    success: bool
    message: str


class RebalanceExpertsReqInput(_Operation, kw_only=True, tag=True):
    pass


class RebalanceExpertsReqOutput(_Operation, kw_only=True, tag=True):
    success: bool
    message: str


class GetWeightsByNameReqInput(_Operation, kw_only=True, tag=True):
    name: str
    truncate_size: int = 100


class GetWeightsByNameReqOutput(_Operation, kw_only=True, tag=True):
    parameter: list[Any]


class ReleaseMemoryOccupationReqInput(_Operation, kw_only=True, tag=True):
    tags: list[str] | None = None


class ReleaseMemoryOccupationReqOutput(_Operation, kw_only=True, tag=True):
    success: bool = True
    message: str = ""


class ResumeMemoryOccupationReqInput(_Operation, kw_only=True, tag=True):
    tags: list[str] | None = None


class ResumeMemoryOccupationReqOutput(_Operation, kw_only=True, tag=True):
    success: bool = True
    message: str = ""


class IsSleepingReqInput(_Operation, kw_only=True, tag=True):
    pass


class IsSleepingReqOutput(_Operation, kw_only=True, tag=True):
    is_sleeping: bool


class GetInternalStateReq(_Operation, kw_only=True, tag=True):
    pass


class GetInternalStateReqOutput(_Operation, kw_only=True, tag=True):
    internal_state: dict[str, Any]


class SetInternalStateReq(_Operation, kw_only=True, tag=True):
    server_args: dict[str, Any]


class SetInternalStateReqOutput(_Operation, kw_only=True, tag=True):
    updated: bool
    server_args: dict[str, Any]


class ProfileReqType(IntEnum):
    """Which edge of a profile."""

    START = 1
    STOP = 2


class ProfileReq(_Operation, kw_only=True, tag=True):
    type: ProfileReqType
    output_dir: str | None = None
    start_step: int | None = None
    num_steps: int | None = None
    activities: list[str] | None = None
    profile_by_stage: bool = False
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_id: str | None = None


class ProfileReqOutput(_Operation, kw_only=True, tag=True):
    success: bool
    message: str


class AbortReq(_Operation, kw_only=True, tag=True):
    """The end of one request, on the original engine's in-process channel."""


NativeRequest = (
    FlushCacheReqInput
    | PauseSchedulerReqInput
    | ResumeSchedulerReqInput
    | IsSchedulerPausedReqInput
    | UpdateWeightFromDiskReqInput
    | UpdateWeightsFromDistributedReqInput
    | UpdateWeightsFromTensorReqInput
    | InitWeightsUpdateGroupReqInput
    | DestroyWeightsUpdateGroupReqInput
    | UpdateWeightsFromMooncakeReqInput
    | RebalanceExpertsReqInput
    | GetWeightsByNameReqInput
    | ReleaseMemoryOccupationReqInput
    | ResumeMemoryOccupationReqInput
    | IsSleepingReqInput
    | GetInternalStateReq
    | SetInternalStateReq
    | ProfileReq
)

decode_native: Callable[[Buffer], NativeRequest] = decoder(NativeRequest)

YES = "true"
"""The message by which a question that was asked by name is answered yes."""

_METHOD_WORD = re.compile(r"(?<!^)(?=[A-Z])")


def call_of(request: NativeRequest) -> tuple[str, tuple[Any, ...]]:
    """Return the method and arguments that ask for the same by name."""
    if isinstance(request, ProfileReq):
        if request.type is ProfileReqType.STOP:
            return "stop_profile", ()
        options = msgspec.structs.asdict(request)
        for name in ("rid", "http_worker_ipc", "type"):
            del options[name]
        return "start_profile", (options,)
    kind = type(request).__name__.removesuffix("Input").removesuffix("Req")
    args = msgspec.structs.astuple(request)[2:]
    return _METHOD_WORD.sub("_", kind).lower(), args


def reply_to(request: NativeRequest, success: bool, message: str) -> Struct:
    """Return the reply to `request` that says what a call's reply would say."""
    match request:
        case FlushCacheReqInput():
            return FlushCacheReqOutput(rid=request.rid, success=success)
        case IsSchedulerPausedReqInput():
            return IsSchedulerPausedReqOutput(rid=request.rid, is_paused=message == YES)
        case IsSleepingReqInput():
            return IsSleepingReqOutput(rid=request.rid, is_sleeping=message == YES)
        case GetWeightsByNameReqInput():
            told = msgspec.json.decode(message) if success else []
            return GetWeightsByNameReqOutput(rid=request.rid, parameter=told)
        case GetInternalStateReq():
            state = msgspec.json.decode(message) if success else {}
            return GetInternalStateReqOutput(rid=request.rid, internal_state=state)
        case SetInternalStateReq():
            return SetInternalStateReqOutput(
                rid=request.rid, updated=success, server_args=request.server_args
            )
        case _:
            plain = _PLAIN_REPLIES[type(request)]
            reply: Struct = plain(rid=request.rid, success=success, message=message)
            return reply


_PLAIN_REPLIES: dict[type[Struct], type[Any]] = {
    PauseSchedulerReqInput: PauseSchedulerReqOutput,
    ResumeSchedulerReqInput: ResumeSchedulerReqOutput,
    UpdateWeightFromDiskReqInput: UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromDistributedReqInput: UpdateWeightsFromDistributedReqOutput,
    UpdateWeightsFromTensorReqInput: UpdateWeightsFromTensorReqOutput,
    InitWeightsUpdateGroupReqInput: InitWeightsUpdateGroupReqOutput,
    DestroyWeightsUpdateGroupReqInput: DestroyWeightsUpdateGroupReqOutput,
    UpdateWeightsFromMooncakeReqInput: UpdateWeightsFromMooncakeReqOutput,
    RebalanceExpertsReqInput: RebalanceExpertsReqOutput,
    ReleaseMemoryOccupationReqInput: ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput: ResumeMemoryOccupationReqOutput,
    ProfileReq: ProfileReqOutput,
}
