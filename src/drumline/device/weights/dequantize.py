"""GGUF's block formats, turned into floats.

A block of a format holds 32 or 256 values: a half-precision scale, often a
minimum or a zero point, and small integers packed into bytes. It knows bytes and
shapes only, neither files nor models.

The layouts are ggml's. Byte by byte, with `d` the scale and `m` the minimum:
the 32-value formats store `d`, (`m`,) (the fifth bits,) the integers, whose low
nibbles are the first 16 values; the 256-value formats share `d` (and `m`) among
sub-blocks of 16 or 32 values that have small integer scales of their own.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from drumline.core.gguf_file import BLOCKS, TensorType

Decoded = tuple[Tensor, Tensor, Tensor | None]
"""Small integers, the scale they are multiplied with, and what is added then."""


def dequantize(data: Tensor, kind: TensorType, out: Tensor) -> None:
    """Write the values of `data`, uint8 `[bytes]` on the host, to `out`.

    That is of any shape and float type, on any device.
    """
    flat = out.view(-1)
    if kind in _PLAIN:
        flat.copy_(data.view(_PLAIN[kind]))
        return
    values, size = BLOCKS[kind]
    blocks = data.view(-1, size)
    direct = out.dtype == torch.float32 and out.device.type == "cpu"
    # In pieces that stay in the processor's cache, whatever the tensor's size.
    step = _PIECE_VALUES // values
    for start in range(0, len(blocks), step):
        integers, scale, minimum = decoded(blocks[start : start + step], kind)
        place = flat[start * values : start * values + integers.numel()].view(integers.shape)
        piece = place if direct else torch.empty(integers.shape)
        torch.mul(integers, scale, out=piece)
        if minimum is not None:
            piece += minimum
        if not direct:
            place.copy_(piece)


def decoded(blocks: Tensor, kind: TensorType) -> Decoded:
    """Return the integers of blocks, `[blocks, bytes]`, and what they are multiplied with.

    Each is of 8 bits, `[blocks, ..., n]` where n share a scale.
    """
    return _DECODERS[kind](blocks)


_PIECE_VALUES = 1 << 18
_PLAIN = {
    TensorType.F32: torch.float32,
    TensorType.F16: torch.float16,
    TensorType.BF16: torch.bfloat16,
}


def _half(blocks: Tensor, offset: int) -> Tensor:
    return blocks[:, offset : offset + 2].view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[n, b] bytes to [n, 2b] values: all low nibbles, then all high ones."""
    return _shifted(packed, range(0, 8, 4), 15).reshape(len(packed), -1)


def _shifted(packed: Tensor, shifts: range, mask: int) -> Tensor:
    """[..., b] bytes to [..., len(shifts), b] values of a few bits each."""
    # One shift after the other: with a tensor of them each is slower by a multiple.
    packed = packed.contiguous()
    return torch.stack([(packed >> shift) & mask for shift in shifts], -2)


def _fifth_bits(blocks: Tensor, offset: int) -> Tensor:
    words = blocks[:, offset : offset + 4].contiguous().view(torch.int32)
    return ((words >> torch.arange(32, dtype=torch.int32)) & 1).to(torch.uint8) << 4


def _q4_0(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 2:]).view(torch.int8) - 8, _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Decoded:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return values.view(torch.int8) - 16, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Decoded:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return values, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Decoded:
    return blocks[:, 2:].view(torch.int8), _half(blocks, 0), None


def _q2_k(blocks: Tensor) -> Decoded:
    packed = blocks[:, :16]
    scale = (_half(blocks, 80) * (packed & 15)).unsqueeze(2)
    minimum = (_half(blocks, 82) * (packed >> 4)).unsqueeze(2)
    return _two_bits(blocks[:, 16:80]).view(-1, 16, 16), scale, -minimum


def _q3_k(blocks: Tensor) -> Decoded:
    low = _two_bits(blocks[:, 32:96])
    high = _shifted(blocks[:, :32], range(8), 1).reshape(-1, 256)
    values = (low | (high << 2)).view(torch.int8).view(-1, 16, 16) - 4
    packed = blocks[:, 96:108]
    top = _shifted(packed[:, 8:], range(0, 8, 2), 3).reshape(-1, 16)
    scales = (_nibbles(packed[:, :8]) | (top << 4)).view(torch.int8) - 32
    return values, (_half(blocks, 108) * scales).unsqueeze(2), None


def _two_bits(packed: Tensor) -> Tensor:
    """[n, 64] bytes to [n, 256] values: two halves of 32 bytes, each four values deep."""
    return _shifted(packed.reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 256)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the eight 6-bit scales and minima of Q4_K and Q5_K; both [n, 8, 1]."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), 1)
    return (_half(blocks, 0) * scales).unsqueeze(2), (_half(blocks, 2) * minima).unsqueeze(2)


def _q4_k(blocks: Tensor) -> Decoded:
    scale, minimum = _scales_and_minima(blocks)
    values = _shifted(blocks[:, 16:].reshape(-1, 4, 32), range(0, 8, 4), 15)
    return values.reshape(-1, 8, 32), scale, -minimum


def _q5_k(blocks: Tensor) -> Decoded:
    scale, minimum = _scales_and_minima(blocks)
    low = _shifted(blocks[:, 48:].reshape(-1, 4, 32), range(0, 8, 4), 15).reshape(-1, 8, 32)
    high = _shifted(blocks[:, 16:48], range(8), 1)
    return low | (high << 4), scale, -minimum


def _q6_k(blocks: Tensor) -> Decoded:
    low = _shifted(blocks[:, :128].reshape(-1, 2, 64), range(0, 8, 4), 15).reshape(-1, 256)
    high = _two_bits(blocks[:, 128:192])
    values = (low | (high << 4)).view(torch.int8).view(-1, 16, 16) - 32
    scales = blocks[:, 192:208].view(torch.int8)
    return values, (_half(blocks, 208) * scales).unsqueeze(2), None


_DECODERS: dict[TensorType, Callable[[Tensor], Decoded]] = {
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.Q2_K: _q2_k,
    TensorType.Q3_K: _q3_k,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
}
