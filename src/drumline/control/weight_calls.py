"""What calls about weights ask for: from a method's name and arguments to an operation.

Pure: it knows the forms of arguments, and neither what is served nor when an operation runs.
"""

from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from drumline.contract.messages import CallAsked
from drumline.contract.weights import DiskWeights, NamedTensor, SentWeights
from drumline.control.operations import JoinGroup, LeaveGroup, TensorParts, WeightsAsked

Name = Annotated[str, Meta(min_length=1, max_length=1024)]
_Count = Annotated[int, Meta(ge=1, le=1 << 31)]
_Size = Annotated[int, Meta(ge=0, le=1 << 40)]

GROUP = "weight_update_group"
"""The group of a trainer that names none."""


class RowsAsked(Struct, frozen=True):
    """A weight's first rows are to be told."""

    call: int
    name: str
    rows: int


# The arguments of each call, in their order.


class _Disk(Struct, frozen=True, forbid_unknown_fields=True):
    model_path: Name
    load_format: Literal["auto", "safetensors", "gguf"] | None = None
    weight_version: Name | None = None
    flush_cache: bool = True


class _Tensors(Struct, frozen=True, forbid_unknown_fields=True):
    serialized_named_tensors: Annotated[list[bytes], Meta(min_length=1)]
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    weight_version: Name | None = None


class _Sent(Struct, frozen=True, forbid_unknown_fields=True):
    names: Annotated[list[Name], Meta(min_length=1)]
    dtype_names: list[str]
    shapes: list[list[_Size]]
    group_name: Name = GROUP
    flush_cache: bool = True
    weight_version: Name | None = None


class _Join(Struct, frozen=True, forbid_unknown_fields=True):
    master_address: Name
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: _Count
    world_size: _Count
    group_name: Name = GROUP
    backend: str = "nccl"


class _Leave(Struct, frozen=True, forbid_unknown_fields=True):
    group_name: Name = GROUP


class _Rows(Struct, frozen=True, forbid_unknown_fields=True):
    name: Name
    truncate_size: _Count = 100


class _Version(Struct, frozen=True, forbid_unknown_fields=True):
    new_version: Name


class CallRefusedError(Exception):
    """Why a call asks for nothing; its text is for whoever called."""


def operation(call: CallAsked) -> WeightsAsked:
    """Return what a call of `METHODS` asks for. Raises CallRefusedError."""
    return METHODS[call.method](call)


def rows_asked(call: CallAsked) -> RowsAsked:
    """Return which weight a call wants to see. Raises CallRefusedError."""
    asked = _converted(call, _Rows)
    return RowsAsked(call.call_id, asked.name, asked.truncate_size)


def version_asked(call: CallAsked) -> str:
    """Return what a call names the weights that serve. Raises CallRefusedError."""
    version: str = _converted(call, _Version).new_version
    return version


def _disk(call: CallAsked) -> WeightsAsked:
    asked = _converted(call, _Disk)
    source = DiskWeights(asked.model_path)
    return WeightsAsked(call.call_id, source, asked.flush_cache, asked.weight_version)


def _tensors(call: CallAsked) -> WeightsAsked:
    asked = _converted(call, _Tensors)
    work = TensorParts(tuple(asked.serialized_named_tensors))
    return WeightsAsked(call.call_id, work, asked.flush_cache, asked.weight_version)


def _sent(call: CallAsked) -> WeightsAsked:
    asked = _converted(call, _Sent)
    counts = len(asked.names), len(asked.dtype_names), len(asked.shapes)
    if len(set(counts)) > 1:
        raise CallRefusedError(
            "every tensor has a name, a type and a shape; there are {} names, {} dtype_names and "
            "{} shapes".format(*counts)
        )
    name, times = Counter(asked.names).most_common(1)[0]
    if times > 1:
        raise CallRefusedError(f"{name} is named twice")
    tensors = tuple(
        NamedTensor(name, dtype.removeprefix("torch."), tuple(shape))
        for name, dtype, shape in zip(asked.names, asked.dtype_names, asked.shapes, strict=True)
    )
    work = SentWeights(asked.group_name, tensors)
    return WeightsAsked(call.call_id, work, asked.flush_cache, asked.weight_version)


def _join(call: CallAsked) -> WeightsAsked:
    asked = _converted(call, _Join)
    work = JoinGroup(
        asked.master_address,
        asked.master_port,
        asked.rank_offset,
        asked.world_size,
        asked.group_name,
        asked.backend,
    )
    return WeightsAsked(call.call_id, work)


def _leave(call: CallAsked) -> WeightsAsked:
    return WeightsAsked(call.call_id, LeaveGroup(_converted(call, _Leave).group_name))


METHODS: dict[str, Callable[[CallAsked], WeightsAsked]] = {
    "update_weight_from_disk": _disk,
    "update_weights_from_tensor": _tensors,
    "update_weights_from_distributed": _sent,
    "init_weights_update_group": _join,
    "destroy_weights_update_group": _leave,
}


def _converted(call: CallAsked, form: type[Any]) -> Any:
    """Return a call's arguments, which stand in their order or in one map, as a `form`."""
    names = form.__struct_fields__
    given = call.args[0] if call.args and isinstance(call.args[0], dict) else None
    told = dict(zip(names, call.args, strict=False)) if given is None else given
    try:
        return msgspec.convert(told, form)
    except msgspec.ValidationError as error:
        raise CallRefusedError(f"{error}; it takes {', '.join(names)}") from None
