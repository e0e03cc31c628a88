"""What a frontend sends an engine: a type byte, the message, and frames of tensors."""

import re
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from msgspec import Struct

from drumline.wire.codec import Buffer, MalformedFrameError, decode_any, decoder, encode
from drumline.wire.control import NativeRequest, decode_native
from drumline.wire.request import TokenizedGenerateReqInput


class InputKind(IntEnum):
    """The first frame of an input message."""

    ADD = 0
    ABORT = 1
    CONTROL = 2


class Call(Struct, array_like=True):
    """A control operation by method name, answered under its id."""

    call_id: int
    method: str
    args: list[Any] = []


decode_generate: Callable[[Buffer], TokenizedGenerateReqInput] = decoder(TokenizedGenerateReqInput)
decode_rids: Callable[[Buffer], list[str]] = decoder(list[str])
_decode_call: Callable[[Buffer], Call] = decoder(Call)


MOST_TENSOR_BYTES = 192 * 1024 * 1024
"""Of tensors in one call; more are sent in several. All that one round takes in has room in an
exchange among ranks."""


_NAMES = (b"update_weights_from_tensor", b"UpdateWeightsFromTensorReqInput")
# A call has its id before its method; an operation of its own begins with its name.
_WITH_TENSORS = re.compile(
    rb"(?:[\x90-\x9f]|\xdc..|\xdd.{4})"
    rb"(?:[\x00-\x7f]|\xcc.|\xcd..|\xce.{4}|\xcf.{8})?"
    rb"(?:" + b"|".join(re.escape(b"%c%b" % (0xA0 + len(n), n)) for n in _NAMES) + rb")",
    re.DOTALL,
)


def kind_of(frames: Sequence[Buffer]) -> InputKind:
    """Return what an input message is. Raises MalformedFrameError."""
    if len(frames) < 2:
        raise MalformedFrameError(
            f"an input message has a type and a payload, {len(frames)} frame came"
        )
    if len(frames[0]) != 1:
        raise MalformedFrameError(f"a message type is one byte, {len(frames[0])} came")
    try:
        return InputKind(frames[0][0])
    except ValueError:
        raise MalformedFrameError(f"unknown message type {frames[0][0]:#04x}") from None


def carries_tensors(payload: Buffer) -> bool:
    """Whether a control message is the one with tensors in it, by its name, undecoded."""
    return _WITH_TENSORS.match(payload) is not None


def decode_control(payload: Buffer) -> Call | NativeRequest:
    """Return a control message: a call, or an operation as a struct of its own."""
    head = decode_any(payload)
    if isinstance(head, list) and head and isinstance(head[0], str):
        return decode_native(payload)
    return _decode_call(payload)


def add_frames(request: TokenizedGenerateReqInput, tensors: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the frames of a generate request, its tensors' frames last."""
    return [b"\x00", encode(request), *tensors]


def abort_frames(rids: Sequence[str]) -> list[Buffer]:
    """Return the frames that end requests."""
    return [b"\x01", encode(list(rids))]


def call_frames(call_id: int, method: str, args: Sequence[Any]) -> list[Buffer]:
    """Return the frames of a control call."""
    return [b"\x02", encode(Call(call_id, method, list(args)))]
