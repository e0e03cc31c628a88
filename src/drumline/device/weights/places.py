"""Where each weight lies in this rank's memory, so that it can be written again, and read.

It knows nothing of models: a place is noted when a weight is read into it.
"""

from msgspec import Struct
from torch import Tensor

from drumline.device.weights.source import Cut, StoredBlocks, WeightSource, stored_shape


class Place(Struct, frozen=True, eq=False):
    """The memory of a weight, or of the part of it that this rank holds."""

    out: Tensor
    cut: Cut | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole weight."""
        return stored_shape(self.out, self.cut)

    def first(self, rows: int) -> Tensor:
        """Return the first of this rank's rows as float32, `rows` at most."""
        return self.out[:rows].float()

    def part(self, whole: Tensor) -> Tensor:
        """Return what of the whole weight belongs here."""
        if self.cut is None:
            return whole
        return whole.narrow(self.cut.dim, self.cut.span.start, len(self.cut.span))


class Noted:
    """A source of weights that notes where each was read to."""

    __slots__ = ("_source", "places")

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.places: dict[str, Place] = {}

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def read(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        self._source.read(name, out, cut)
        self.places[name] = Place(out, cut)

    def blocks(
        self, name: str, shape: tuple[int, int], cut: Cut | None = None
    ) -> StoredBlocks | None:
        return self._source.blocks(name, shape, cut)
