"""Where a model takes its weights from, whatever the file format."""

from typing import Protocol

import torch
from torch import Tensor

from drumline.core.errors import ConfigError


class WeightSource(Protocol):
    """A checkpoint's tensors, read one by one into memory of their own."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of that name."""

    def read(self, name: str, out: Tensor) -> None:
        """Fill `out` with the tensor `name`, converted to `out`'s type.

        Raises ConfigError naming the file when the tensor is missing or its shape
        is not `out`'s.
        """


def new_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a weight. Raises ConfigError when the device has none left."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError("--model", f"no memory for a weight of shape {shape}: {error}") from error
