"""What a frontend sends a rank, decoded: the messages of the relay."""

from typing import Any

import msgspec
from msgspec import Struct

from drumline.contract.arrays import decode_array, encode_array
from drumline.contract.request import GenerateRequest


class Submitted(Struct, frozen=True, tag="submit"):
    """A request to generate."""

    request: GenerateRequest


class AbortAsked(Struct, frozen=True, tag="abort"):
    """The client of these requests is gone."""

    rids: tuple[str, ...]


class CallAsked(Struct, frozen=True, tag="call"):
    """A control operation, by method name; answered under its call id."""

    call_id: int
    method: str
    args: tuple[Any, ...] = ()


Message = Submitted | AbortAsked | CallAsked


class CallReply(Struct, frozen=True):
    """The answer to a control operation."""

    call_id: int
    success: bool
    message: str = ""


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
_decoder = msgspec.msgpack.Decoder(tuple[Message, ...], dec_hook=decode_array)


def encode_messages(messages: tuple[Message, ...]) -> bytes:
    """Encode one round's messages for the relay."""
    return _encoder.encode(messages)


def decode_messages(data: bytes) -> tuple[Message, ...]:
    """Decode what `encode_messages` made. Raises msgspec.DecodeError or ValidationError."""
    return _decoder.decode(data)
