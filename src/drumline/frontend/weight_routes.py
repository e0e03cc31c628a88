"""The routes by which trainers change weights while the engine serves, under SGLang's names."""

import asyncio
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from drumline.core.errors import ConfigError, RequestError
from drumline.core.model_files import find_model
from drumline.frontend.engine_control import Outcome
from drumline.frontend.operation import Nothing, Operation, Route, Turns
from drumline.frontend.service import Service
from drumline.wire.frames import MOST_TENSOR_BYTES

_MOST_BODY_BYTES = MOST_TENSOR_BYTES * 4 // 3 + (1 << 20)
"""Tensors in base64, and a word beside them."""
_GROUP = "weight_update_group"
_Count = Annotated[int, Meta(ge=1, le=1 << 31)]
_Size = Annotated[int, Meta(ge=0, le=1 << 40)]


def weight_routes(service: Service) -> list[Route]:
    """Return every route that changes weights, or tells of them."""
    control, limit = service.control, service.server.max_body_bytes
    running = service.operations

    async def load(method: str, asked: _Load, *fields: Any) -> Outcome:
        return await control.load_weights(
            method,
            fields,
            version=asked.weight_version,
            abort=asked.abort_all_requests,
            rests=asked.keep_pause,
        )

    async def disk(asked: _Disk) -> Outcome:
        version, flush = asked.weight_version, asked.flush_cache
        path = asked.model_path or service.engine.weight_path or await _started_with(service)
        fields = path, asked.load_format, version, flush
        return await load("update_weight_from_disk", asked, *fields)

    async def tensors(asked: _Tensors) -> Outcome:
        version, flush = asked.weight_version, asked.flush_cache
        fields = asked.serialized_named_tensors, asked.load_format, flush, version
        return await load("update_weights_from_tensor", asked, *fields)

    async def sent(asked: _Sent) -> Outcome:
        version, flush = asked.weight_version, asked.flush_cache
        fields = asked.names, asked.dtypes, asked.shapes, asked.group_name, flush, version
        return await load("update_weights_from_distributed", asked, *fields)

    async def join(asked: _Join) -> Outcome:
        return await control.join_weight_group(
            asked.master_address,
            asked.master_port,
            asked.rank_offset,
            asked.world_size,
            asked.group_name,
            asked.backend,
        )

    async def leave(asked: _Leave) -> Outcome:
        return await control.leave_weight_group(asked.group_name)

    async def version(_: Nothing) -> _Version:
        return _Version(await control.weight_version())

    async def rename(asked: _Rename) -> Outcome:
        return await control.rename_weights(asked.new_version)

    async def rows(asked: _Rows) -> Raw:
        return await control.weight_rows(asked.name, asked.truncate_size)

    told = Operation(limit, running, Nothing, version)
    carried = Operation(
        _MOST_BODY_BYTES,
        running,
        _Tensors,
        tensors,
        carries="serialized_named_tensors",
        turns=Turns(service.timings.turn_s, service.timings.body_s),
    )
    return [
        ("POST", "/update_weights_from_disk", Operation(limit, running, _Disk, disk)),
        ("POST", "/update_weights_from_tensor", carried),
        ("POST", "/update_weights_from_distributed", Operation(limit, running, _Sent, sent)),
        ("POST", "/init_weights_update_group", Operation(limit, running, _Join, join)),
        ("POST", "/destroy_weights_update_group", Operation(limit, running, _Leave, leave)),
        ("GET", "/get_weight_version", told),
        ("GET", "/weight_version", told),
        ("POST", "/update_weight_version", Operation(limit, running, _Rename, rename)),
        ("GET POST", "/get_weights_by_name", Operation(limit, running, _Rows, rows)),
    ]


async def _started_with(service: Service) -> str:
    """Return where the weights lie that were loaded first. Raises RequestError 400 if nowhere."""
    try:
        # Where a name stands for files, finding them may take a while.
        found = await asyncio.to_thread(find_model, service.config.model.model)
    except ConfigError as error:
        raise RequestError(400, str(error), param="model_path") from None
    return str(found.path)


class _Load(Struct, forbid_unknown_fields=True, kw_only=True):
    """What loads of every kind are told."""

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    keep_pause: bool = False
    """Whether the engine stays paused afterwards."""
    # What SGLang's clients may say besides, and changes nothing here.
    is_async: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    token_step: _Size = 0


class _Disk(_Load):
    model_path: str | None = None
    """What was loaded last by default."""
    load_format: str | None = None


class _Tensors(_Load):
    serialized_named_tensors: list[bytes]
    load_format: str | None = None


class _Sent(_Load):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[_Size]]
    group_name: str = _GROUP
    load_format: Literal["auto"] | None = None
    """Tensors are sent one by one, as they are."""


class _Join(Struct, forbid_unknown_fields=True):
    master_address: str
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: _Count
    world_size: _Count
    group_name: str = _GROUP
    backend: str = "nccl"


class _Leave(Struct, forbid_unknown_fields=True):
    group_name: str = _GROUP


class _Rename(Struct, forbid_unknown_fields=True):
    new_version: str


class _Rows(Struct, forbid_unknown_fields=True):
    name: str
    truncate_size: _Count = 100


class _Version(Struct, frozen=True):
    weight_version: str
