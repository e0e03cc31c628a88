"""Where the weights of a running engine are to come from, and what is told of them."""

from msgspec import Struct


class DiskWeights(Struct, frozen=True):
    """A checkpoint on a disk that every rank can read: a directory or a file."""

    path: str

    def __str__(self) -> str:
        return self.path


class TensorWeights(Struct, frozen=True):
    """Tensors by name, as the bytes of a safetensors file."""

    data: bytes

    def __str__(self) -> str:
        return f"{len(self.data)} bytes of tensors"


class NamedTensor(Struct, frozen=True):
    """What is announced of a tensor: its name, its float type as `bfloat16`, its whole shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SentWeights(Struct, frozen=True):
    """Tensors that the first rank of a group sends, one after the other."""

    group: str
    tensors: tuple[NamedTensor, ...]

    def __str__(self) -> str:
        return f"{len(self.tensors)} tensors of group {self.group}"


NewWeights = DiskWeights | TensorWeights | SentWeights


class WeightGroup(Struct, frozen=True):
    """A trainer's group: where its members meet, and this rank's place among them."""

    name: str
    address: str
    port: int
    rank: int
    size: int
    backend: str


class WeightRows(Struct, frozen=True):
    """The first rows of a weight, as far as one rank has them.

    `data` are float32 values, row by row. Along `dim` the rank has `start` to `stop` of the
    whole; all of it where `dim` is None.
    """

    shape: tuple[int, ...]
    """Of the whole weight."""
    data: bytes
    dim: int | None = None
    start: int = 0
    stop: int = 0
