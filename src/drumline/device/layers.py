"""The layers decoders are made of, each a small object that maps tensors to tensors.

They know shapes and weights; they do not know which model they stand in.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional

from drumline.device.attention import Attention
from drumline.device.kernels.native import Machine
from drumline.device.kv import KvPool
from drumline.device.parallel import TensorGroup


class Linear(Protocol):
    """A matrix product behind which any kernel and any packing of the weights may stand."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[tokens, in]` to `[tokens, out]`."""


class Backend(Struct, frozen=True):
    """The kernels a model is built on. `linear` takes the weight `[out, in]` and the bias over.

    Weights that are stored as small integers stay so if it `packs`, on its `machine`. If it makes
    `one_call` of a forward, all others are the machine's too, in place of `linear`: of a model
    that one rank has and whose sizes are multiples of 8.
    """

    name: str
    linear: Callable[[Tensor, Tensor | None], Linear]
    attention: Callable[[KvPool], Attention]
    machine: Machine | None = None
    packs: bool = False
    one_call: bool = False


class TorchLinear:
    """The reference linear layer."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class SummedLinear:
    """A linear layer whose input lies in parts over a group's ranks: what they make is summed."""

    __slots__ = ("_group", "_own")

    def __init__(self, own: Linear, group: TensorGroup) -> None:
        self._own = own
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.sum(self._own(x))


class Vectors(Protocol):
    """A vocabulary's vectors, however they are kept."""

    def __call__(self, ids: Tensor) -> Tensor:
        """Map `[tokens]` to `[tokens, hidden]`."""


class Embedding:
    """The vectors of token ids."""

    __slots__ = ("_weight",)

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self._weight)


class PartEmbedding:
    """An embedding whose vocabulary lies in parts over a group's ranks.

    This one has `count` entries from `start` on.
    """

    __slots__ = ("_count", "_group", "_own", "_start")

    def __init__(self, own: Vectors, start: int, count: int, group: TensorGroup) -> None:
        self._own = own
        self._start = start
        self._count = count
        self._group = group

    def __call__(self, ids: Tensor) -> Tensor:
        own = ids - self._start
        foreign = (own < 0) | (own >= self._count)
        found = self._own(own.masked_fill(foreign, 0))
        # Others add zeros to what one rank has: the sum is exact.
        return self._group.sum(found.masked_fill_(foreign.unsqueeze(1), 0))


class PartHead:
    """An output head whose vocabulary lies in parts over a group's ranks.

    Every rank gets the whole rows, the same bits on each, so that all draw the same tokens.
    `width` is the entries of the largest part, `vocab` those of all.
    """

    __slots__ = ("_group", "_own", "_vocab", "_width")

    def __init__(self, own: Linear, width: int, vocab: int, group: TensorGroup) -> None:
        self._own = own
        self._width = width
        self._vocab = vocab
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._own(x)
        if not len(logits):
            return logits.new_empty((0, self._vocab))
        padded = functional.pad(logits, (0, self._width - logits.shape[1]))
        # Whole rows one behind the other, as whoever draws from them reads them.
        return self._group.joined(padded)[:, : self._vocab].contiguous()


class RmsNorm:
    """Root mean square normalization over the last dimension."""

    __slots__ = ("_eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self._eps)


class Rotary:
    """Rotation of queries and keys by their positions; a head's halves are the pairs."""

    __slots__ = ("_frequencies",)

    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, `[tokens, 1, head_dim]`, for all layers of a forward."""
        angle = positions.float().unsqueeze(1) * self._frequencies
        angle = torch.cat((angle, angle), 1).unsqueeze(1)
        return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `x`, `[tokens, heads, head_dim]`."""
    cosine, sine = angles
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return the plain rotary frequencies, `[head_dim / 2]`."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)


def stretched_frequencies(
    frequencies: Tensor, factor: float, low: float, high: float, original: int
) -> Tensor:
    """Return Llama 3's frequencies for contexts beyond the `original` positions.

    Wavelengths of more than `original / low` positions are stretched by `factor`,
    those below `original / high` are kept, and between them it is blended.
    """
    wavelength = 2 * math.pi / frequencies
    share = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * (1 - share) + frequencies * share


class GatedMlp:
    """The gated feed-forward block: `down(silu(gate(x)) * up(x))`, gate and up in one product."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(functional.silu(gate) * up)
