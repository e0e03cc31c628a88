"""Where a model takes its weights from, whatever the file format."""

from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from drumline.core.gguf_file import TensorType


class Span(Struct, frozen=True):
    """`start` to `stop` of `whole`."""

    start: int
    stop: int
    whole: int

    def __len__(self) -> int:
        return self.stop - self.start


def all_of(size: int) -> Span:
    """Return the span that is the whole."""
    return Span(0, size, size)


class Cut(Struct, frozen=True):
    """The part of a stored tensor that is read: a span of its rows (0) or columns (1)."""

    dim: int
    span: Span

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the stored tensor's shape, given the part's."""
        return (*shape[: self.dim], self.span.whole, *shape[self.dim + 1 :])


class StoredBlocks(Struct, frozen=True, eq=False):
    """Rows of small integers as they lie in a checkpoint's file, in blocks of its format."""

    kind: TensorType
    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    """Where in `data` each row's first block begins; a row's blocks lie back to back."""
    columns: int
    skipped: int = 0
    """Values of a row's first block that come before its columns."""


class WeightSource(Protocol):
    """A checkpoint's tensors, read one by one into memory of their own."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of that name."""

    def read(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        """Fill `out` with the tensor `name` or a part of it, converted to `out`'s type.

        Raises ConfigError naming the file when the tensor is missing or its shape
        is not `out`'s, or not what `out` would be a part of.
        """

    def blocks(
        self, name: str, shape: tuple[int, int], cut: Cut | None = None
    ) -> StoredBlocks | None:
        """Return a part of shape `shape` as it is stored, or None where it is not in such blocks.

        None as well for what `read` refuses, and for a part that begins or ends within 32 values.
        """


def stored_shape(out: Tensor, cut: Cut | None) -> tuple[int, ...]:
    """Return the shape of the stored tensor that `out` takes, or takes a part of."""
    shape = tuple(out.shape)
    return cut.stored(shape) if cut is not None else shape
