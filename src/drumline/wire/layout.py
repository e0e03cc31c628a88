"""Reading outputs: in the field order an engine declared, and no more than somebody asked for.

The first 13 columns of a batch stand where they stand; the ones behind them are found
by the names an engine registers, for engines append columns in orders of their own.
Most columns of most batches say nothing, an empty entry a row. Those are recognized by
their bytes and never unpacked, which makes reading a batch several times cheaper.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from drumline.wire.codec import Buffer, MalformedFrameError, converted, decode_any, decoder
from drumline.wire.output import (
    LOGPROB_COLUMNS,
    OPTIONAL_COLUMNS,
    BatchTokenIDOutSlim,
    ControlReplySlim,
    Output,
)

_FIELDS = list(BatchTokenIDOutSlim.__struct_fields__)
_FIXED = len(_FIELDS) - len(OPTIONAL_COLUMNS)
_REPLY_FIELDS = list(ControlReplySlim.__struct_fields__)
_EMPTY = b"\x90"
_SPARSE = {
    field.name: decoder(field.type)
    for field in msgspec.structs.fields(BatchTokenIDOutSlim)
    if field.name in {*LOGPROB_COLUMNS, *OPTIONAL_COLUMNS}
}


def _unread_struct() -> Any:
    """Return the batch's struct with its sparse columns left as bytes."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(BatchTokenIDOutSlim):
        if field.name in OPTIONAL_COLUMNS:
            fields.append((field.name, Raw, Raw(_EMPTY)))
        elif field.name in LOGPROB_COLUMNS:
            fields.append((field.name, Raw))
        elif field.required:
            fields.append((field.name, field.type))
        else:
            fields.append((field.name, field.type, field.default))
    return msgspec.defstruct(
        "Unread", fields, array_like=True, kw_only=True, tag=BatchTokenIDOutSlim.__name__
    )


_Unread = _unread_struct()
_decode_unread = decoder(_Unread | ControlReplySlim)


def decode_output(data: Buffer) -> Output:
    """Return an output in this wire's own field order. Raises MalformedFrameError.

    Sparse columns that say nothing come back empty.
    """
    message = _decode_unread(data)
    return message if isinstance(message, ControlReplySlim) else _read(message)


def _read(unread: Any) -> BatchTokenIDOutSlim:
    rows = len(unread.rids)
    head = _array_head(rows)
    # What "nothing" looks like in the columns' types: an empty list, nil, zero.
    nothing = {_EMPTY, head + _EMPTY * rows, head + b"\xc0" * rows, head + b"\x00" * rows}
    columns: dict[str, Any] = {}
    for name, decode in _SPARSE.items():
        raw = bytes(getattr(unread, name))
        if raw in nothing:
            if rows and raw == _EMPTY and name in LOGPROB_COLUMNS:
                raise MalformedFrameError(f"column {name} has not the batch's {rows} rows")
            columns[name] = []
        else:
            columns[name] = decode(raw)
    return BatchTokenIDOutSlim(
        rids=unread.rids,
        output_ids=unread.output_ids,
        finished_reasons=unread.finished_reasons,
        prompt_tokens=unread.prompt_tokens,
        completion_tokens=unread.completion_tokens,
        cached_tokens=unread.cached_tokens,
        engine_index=unread.engine_index,
        num_running=unread.num_running,
        num_waiting=unread.num_waiting,
        kv_active_pages=unread.kv_active_pages,
        kv_total_pages=unread.kv_total_pages,
        **columns,
    )


def _array_head(size: int) -> bytes:
    """Return how an array of `size` elements begins."""
    if size < 1 << 4:
        return bytes((0x90 | size,))
    if size < 1 << 16:
        return b"\xdc" + size.to_bytes(2, "big")
    return b"\xdd" + size.to_bytes(4, "big")


def output_decoder(layouts: Mapping[str, Sequence[str]]) -> Callable[[Buffer], Output]:
    """Return the decoder of an engine that declared `layouts`; its errors are MalformedFrameError.

    Raises MalformedFrameError for a layout whose fixed part is not this wire's.
    """
    replies = list(layouts.get("ControlReplySlim", _REPLY_FIELDS))
    if replies[: len(_REPLY_FIELDS)] != _REPLY_FIELDS:
        raise MalformedFrameError(
            f"an engine declares ControlReplySlim as {replies}; it must start with {_REPLY_FIELDS}"
        )
    declared = list(layouts.get("BatchTokenIDOutSlim", _FIELDS))
    if declared[:_FIXED] != _FIELDS[: min(_FIXED, len(declared))]:
        raise MalformedFrameError(
            f"an engine declares BatchTokenIDOutSlim as {declared}; "
            f"it must start with {_FIELDS[:_FIXED]}"
        )
    common = min(len(declared), len(_FIELDS))
    if declared[:common] == _FIELDS[:common]:
        return decode_output
    # Slot 0 is the tag.
    slots = {name: slot for slot, name in enumerate(declared, start=1)}

    def decode(data: Buffer) -> Output:
        message = decode_any(data)
        if not isinstance(message, list) or not message:
            raise MalformedFrameError("an output is a non-empty array")
        if message[0] == BatchTokenIDOutSlim.__name__:
            optional = [
                message[slots[name]] if slots.get(name, len(message)) < len(message) else []
                for name in OPTIONAL_COLUMNS
            ]
            if len(message) > _FIXED:
                message = message[: _FIXED + 1] + optional
        output: Output = converted(message, Output)
        return output

    return decode
