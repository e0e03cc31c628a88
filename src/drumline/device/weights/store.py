"""Where a model's weights lie, all in memory of one kind, so that it can be given back.

It does not know what the weights mean, nor which model they make.
"""

import math
import tempfile
from typing import Protocol

import torch
from torch import Tensor

from drumline.core.errors import ConfigError, InvariantError
from drumline.device.memory import File, Memory, trim

_PIECE_BYTES = 64 << 20
_ALIGNED = 64


class _File(File, Protocol):
    """What is needed of a temporary file."""

    def seek(self, offset: int, /) -> int: ...

    def close(self) -> None: ...


class WeightStore:
    """The memory of one set of weights."""

    __slots__ = ("_device", "_dtype", "_file", "_free", "_pieces", "_used", "away")

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make a store without any; weights of `dtype` will lie in it."""
        self._dtype = dtype
        self._device = device
        self._pieces: list[Memory] = []
        self._used: list[int] = []
        """How many bytes of each piece are given out."""
        self._free = 0
        self._file: _File | None = None
        """What the weights are kept in while their memory is away; None if nothing is kept."""
        self.away = False
        """Whether the memory is given back."""

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self._device

    @property
    def why_kept(self) -> str | None:
        """Why the memory cannot be given back, if so."""
        return next((why for piece in self._pieces if (why := piece.why_kept)), None)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for a weight, of another type than others on demand.

        Raises ConfigError when there is none left.
        """
        dtype = dtype or self._dtype
        size = math.prod(shape) * dtype.itemsize
        memory = self._take(size, f"a weight of shape {shape}")
        return memory.view(dtype).view(shape)

    def raw(self, size: int) -> Tensor:
        """Return `size` zero bytes, uint8. Raises ConfigError when there are none left."""
        return self._take(size, f"{size} packed bytes of weights")

    def _take(self, size: int, what: str) -> Tensor:
        rounded = -(-size // _ALIGNED) * _ALIGNED
        try:
            if rounded > self._free:
                self._free = max(rounded, _PIECE_BYTES)
                self._pieces.append(Memory(self._free, self._device))
                self._used.append(0)
        except (OSError, RuntimeError) as error:
            raise ConfigError("--model", f"no memory for {what}: {error}") from error
        start = self._used[-1]
        self._used[-1] += rounded
        self._free -= rounded
        return self._pieces[-1].bytes[start : start + size]

    def offload(self) -> None:
        """Keep the weights in a file without a name, and give their memory back.

        Raises OSError, and nothing happened, when they cannot be written.
        """
        file = tempfile.TemporaryFile(prefix="drumline-weights-")  # noqa: SIM115  it is kept
        try:
            for piece, used in zip(self._pieces, self._used, strict=True):
                piece.write_to(file, used)
            file.flush()
        except OSError:
            file.close()
            raise
        self.drop()
        self._file = file

    def drop(self) -> None:
        """Give the memory back, and keep nothing of the weights."""
        for piece in self._pieces:
            piece.give_back()
        trim(self._device)
        self.away = True

    def restore(self) -> None:
        """Bring the weights back, or where they were dropped the memory alone, all zeros.

        Raises InvariantError when they cannot be read any more.
        """
        if not self.away:
            raise InvariantError("weights are restored that are not away")
        for piece in self._pieces:
            piece.take_back()
        self.away = False
        file, self._file = self._file, None
        if file is None:
            return
        file.seek(0)
        for piece, used in zip(self._pieces, self._used, strict=True):
            if not piece.read_from(file, used):
                raise InvariantError("the file that kept the weights is cut short")
        file.close()
