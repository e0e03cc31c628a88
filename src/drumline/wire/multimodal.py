"""Images, video and audio beside a prompt, and how tensors travel.

A tensor is its dtype's name, its shape and its bytes. Small ones lie inside the
message, larger ones in a frame of their own, which the message names by its index;
frame 0 is the message, so theirs count from 1.
"""

from collections.abc import Sequence
from enum import IntEnum
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.msgpack import Ext

from drumline.wire.codec import Buffer, MalformedFrameError

INLINE_BELOW_BYTES = 256
RAW_BYTES = 3
"""The extension code of a tensor's bytes; 1 and 2 are pickles, which are refused."""

PAD_BASE = 1_000_000
_PAD_SPAN = (2**31 - 1 - PAD_BASE + 1) // 3

_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


class Modality(IntEnum):
    """What an item is."""

    IMAGE = 1
    VIDEO = 2
    AUDIO = 3


class WireTensor(Struct, array_like=True, frozen=True):
    """A tensor as it travels; `data` is its bytes, or the index of the frame that has them.

    `dtype` is torch's name without its prefix (`bfloat16`), or numpy's code (`<i4`).
    """

    dtype: str
    shape: tuple[int, ...]
    data: Ext | int

    def __post_init__(self) -> None:
        if isinstance(self.data, Ext) and self.data.code != RAW_BYTES:
            raise ValueError(f"extension type {self.data.code} is no tensor data")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"no tensor has the shape {self.shape}")


class ShmTensorHandle(Struct, kw_only=True):
    """A tensor in shared memory; a map on the wire."""

    shm_name: str
    shape: tuple[int, ...]
    dtype: str


class MultimodalDataItem(Struct, array_like=True, kw_only=True):
    """One image, video or sound; slots 0 … 9. `offsets` are inclusive on both ends."""

    modality: Modality
    hash: int | None = None
    pad_value: int | None = None
    offsets: list[tuple[int, int]] | None = None
    feature: WireTensor | None = None
    feature_shm: ShmTensorHandle | None = None
    model_specific_data: dict[str, WireTensor] = {}
    encoded: WireTensor | None = None
    encoded_deepstack: WireTensor | None = None
    encode_handshake: dict[str, Any] | None = None


class MultimodalInputs(Struct, array_like=True, kw_only=True):
    """Everything beside a prompt's tokens; slots 0 … 6."""

    mm_items: list[MultimodalDataItem]
    im_token_id: int | None = None
    video_token_id: int | None = None
    mrope_positions: WireTensor | None = None
    mrope_position_delta: WireTensor | None = None
    mrope_position_delta_scalar: int | None = None
    mrope_position_delta_repeated_cache: WireTensor | None = None


def packed(dtype: str, shape: Sequence[int], data: Buffer, frames: list[Buffer]) -> WireTensor:
    """Return a tensor for the wire; appends its bytes to `frames` where they are many.

    `data` is the tensor's contiguous little-endian memory. `frames` are the message's
    auxiliary frames so far.
    """
    if len(data) < INLINE_BELOW_BYTES:
        return WireTensor(dtype, tuple(shape), Ext(RAW_BYTES, bytes(data)))
    frames.append(data)
    return WireTensor(dtype, tuple(shape), len(frames))


def unpacked(tensor: WireTensor, frames: Sequence[Buffer]) -> memoryview:
    """Return the bytes of a tensor that came with the auxiliary `frames`.

    Raises MalformedFrameError when the frame is missing or its size is not the shape's.
    """
    if isinstance(tensor.data, Ext):
        data = memoryview(tensor.data.data)
    elif 1 <= tensor.data <= len(frames):
        data = memoryview(frames[tensor.data - 1])
    else:
        raise MalformedFrameError(
            f"a tensor lies in frame {tensor.data}, but {len(frames)} came with the message"
        )
    expected = prod(tensor.shape) * item_bytes(tensor.dtype)
    if data.nbytes != expected:
        raise MalformedFrameError(
            f"a tensor of {tensor.dtype} {list(tensor.shape)} has {expected} bytes, "
            f"{data.nbytes} came"
        )
    return data


def item_bytes(dtype: str) -> int:
    """Return the size of an element of `dtype`. Raises MalformedFrameError for an unknown one."""
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    if dtype[:1] in {"<", "|"} and dtype[1:2] in set("biuf") and dtype[2:] in {"1", "2", "4", "8"}:
        return int(dtype[2:])
    raise MalformedFrameError(f"unknown dtype {dtype[:32]!r}")


def pad_value(modality: Modality, content_hash: int) -> int:
    """Return the token id that stands for an item's content in its prompt's ids."""
    return PAD_BASE + (modality - 1) * _PAD_SPAN + content_hash % _PAD_SPAN
