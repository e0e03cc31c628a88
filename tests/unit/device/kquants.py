"""Writes K-quants, which the format's own Python package only reads: plain rounding to nearest."""

import numpy as np

from drumline.core.gguf_file import TensorType


def quantize(data, kind):
    """Return float32 rows, of whole blocks of 256, as the bytes of a K-quant: `[..., bytes]`."""
    blocks = data.reshape(-1, 256).astype(np.float32)
    stored = np.concatenate(_WRITERS[kind](blocks), 1)
    return stored.reshape(*data.shape[:-1], -1)


def _half(values):
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _shared(scales, most):
    """Return a float16 scale of each block's scales, and those as its multiples up to `most`."""
    shared = (scales.max(1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    # A block of zeros has a scale of zero.
    return shared, np.rint(scales / np.where(shared > 0, shared, 1)).clip(0, most)


def _nearest(values, scale, least, low, high):
    steps = (values - least) / np.where(scale > 0, scale, 1)
    return np.rint(steps).clip(low, high).astype(np.int8)


def _above_minima(blocks, parts, most, most_scale):
    """Return (d, dmin, scales, minima, integers) of sub-blocks of 256 / `parts` values."""
    cut = blocks.reshape(-1, parts, 256 // parts)
    below = np.maximum(-cut.min(2), 0)
    scales = (np.maximum(cut.max(2), 0) + below) / most
    (d, scales), (dmin, minima) = _shared(scales, most_scale), _shared(below, most_scale)
    at = (d * scales)[:, :, None], -(dmin * minima)[:, :, None]
    integers = _nearest(cut, *at, 0, most).view(np.uint8)
    return d, dmin, scales.astype(np.uint8), minima.astype(np.uint8), integers


def _around_zero(blocks, most, most_scale):
    """Return (d, scales, integers) of sub-blocks of 16 values."""
    cut = blocks.reshape(-1, 16, 16)
    d, scales = _shared(np.abs(cut).max(2) / most, most_scale)
    integers = _nearest(cut, (d * scales)[:, :, None], 0, -most, most - 1)
    return d, scales.astype(np.uint8), integers


def _six_bits(scales, minima):
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate((first, second, scales[:, 4:] & 15 | minima[:, 4:] << 4), 1)


def _joined(integers, shifts):
    """[n, k * len(shifts) * b] to [n, k * b]: neighbouring runs of b in other bits of a byte."""
    return np.bitwise_or.reduce(
        [integers[:, :, i] << shift for i, shift in enumerate(shifts)]
    ).reshape(len(integers), -1)


def _two_bits(integers):
    return _joined((integers & 3).reshape(-1, 2, 4, 32), range(0, 8, 2))


def _q2(blocks):
    d, dmin, scales, minima, integers = _above_minima(blocks, 16, 3, 15)
    return scales | minima << 4, _two_bits(integers), _half(d), _half(dmin)


def _q3(blocks):
    d, scales, integers = _around_zero(blocks, 4, 31)
    integers, scales = (integers + 4).view(np.uint8), scales + 32
    high = _joined((integers >> 2).reshape(-1, 1, 8, 32), range(8))
    low = scales[:, :8] & 15 | scales[:, 8:] << 4
    top = _joined((scales >> 4).reshape(-1, 1, 4, 4), range(0, 8, 2))
    return high, _two_bits(integers), low, top, _half(d)


def _q4(blocks):
    d, dmin, scales, minima, integers = _above_minima(blocks, 8, 15, 63)
    low = _joined(integers.reshape(-1, 4, 2, 32), (0, 4))
    return _half(d), _half(dmin), _six_bits(scales, minima), low


def _q5(blocks):
    d, dmin, scales, minima, integers = _above_minima(blocks, 8, 31, 63)
    high = _joined((integers >> 4).reshape(-1, 1, 8, 32), range(8))
    low = _joined((integers & 15).reshape(-1, 4, 2, 32), (0, 4))
    return _half(d), _half(dmin), _six_bits(scales, minima), high, low


def _q6(blocks):
    d, scales, integers = _around_zero(blocks, 32, 127)
    integers = (integers + 32).view(np.uint8)
    low = _joined((integers & 15).reshape(-1, 2, 2, 64), (0, 4))
    return low, _two_bits(integers >> 4), scales, _half(d)


_WRITERS = {
    TensorType.Q2_K: _q2,
    TensorType.Q3_K: _q3,
    TensorType.Q4_K: _q4,
    TensorType.Q5_K: _q5,
    TensorType.Q6_K: _q6,
}

K_QUANTS = frozenset(_WRITERS)
