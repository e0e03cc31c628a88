"""The noise that tokens are drawn by.

Adding Gumbel noise to the logarithms of weights and taking the largest draws in
proportion to the weights. The noise of a token depends on the request's seed, the
position and the token's id alone, never on the batch or on what was drawn before: a
request draws the same tokens whatever runs beside it, and on whichever row. A change of
a logit in its last digits changes a draw only where two tokens are that close.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drumline.device.staging import all_on_device

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = 1 << 64
_UNIFORM_BITS = 52
"""As many as a half more can be added to without rounding to the next power of two."""


_CPU = torch.device("cpu")


def keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], device: torch.device = _CPU
) -> Tensor:
    """Return what the noise of each row is made from, int64 `[rows]`."""
    rows, places = all_on_device(device, seeds.view(np.int64), positions)
    return _mixed(_mixed(rows) ^ places * _signed(_GOLDEN))


def gumbel(row_keys: Tensor, ids: Tensor) -> Tensor:
    """Return the noise of `ids`, `[rows, many]` or `[many]`, for each row's key; float64."""
    mixed = _mixed(row_keys.unsqueeze(1) ^ ids * _signed(_GOLDEN))
    uniform = _shifted(mixed, 64 - _UNIFORM_BITS).double().add_(0.5).mul_(2.0**-_UNIFORM_BITS)
    return uniform.log_().neg_().log_().neg_()


def _mixed(state: Tensor) -> Tensor:
    """Return splitmix64's next output from each state; int64 wraps around as it should."""
    state = state + _signed(_GOLDEN)
    state = (state ^ _shifted(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shifted(state, 27)) * _signed(_MIX_2)
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    # Torch shifts the sign in; the mask takes it out again.
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD >> 1 else word
