"""Where a model takes its weights from, whatever the file format."""

from typing import Protocol

import torch
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.core.model_files import ModelFiles, ModelFormat
from drumline.device.weights.gguf import GgufWeights
from drumline.device.weights.safetensors import SafetensorsWeights


class WeightSource(Protocol):
    """A checkpoint's tensors, read one by one into memory of their own."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of that name."""

    def read(self, name: str, out: Tensor) -> None:
        """Fill `out` with the tensor `name`, converted to `out`'s type.

        Raises ConfigError naming the file when the tensor is missing or its shape
        is not `out`'s.
        """


def open_weights(files: ModelFiles, *, heads: int, kv_heads: int) -> WeightSource:
    """Open a model's weights. `heads` say how a GGUF file's attention rows were reordered.

    Raises ConfigError naming the file that is missing, unreadable or cut short.
    """
    if files.format is ModelFormat.GGUF:
        return GgufWeights(files.path, heads=heads, kv_heads=kv_heads)
    return SafetensorsWeights(files.path)


def new_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a weight. Raises ConfigError when the device has none left."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError("--model", f"no memory for a weight of shape {shape}: {error}") from error
