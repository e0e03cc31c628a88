"""Reading output batches in the field order that an engine declared.

The first 13 columns stand where they stand; the ones behind them are found by the
names an engine registers, for engines append columns in orders of their own.
"""

from collections.abc import Callable, Mapping, Sequence

from drumline.wire.codec import Buffer, MalformedFrameError, converted, decode_any
from drumline.wire.frames import decode_output
from drumline.wire.output import (
    OPTIONAL_COLUMNS,
    BatchTokenIDOutSlim,
    ControlReplySlim,
    Output,
)

_FIELDS = list(BatchTokenIDOutSlim.__struct_fields__)
_FIXED = len(_FIELDS) - len(OPTIONAL_COLUMNS)
_REPLY_FIELDS = list(ControlReplySlim.__struct_fields__)


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
