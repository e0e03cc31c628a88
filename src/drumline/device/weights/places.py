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

    def part(self, whole: Tensor) -> Tensor:
        """Return what of the whole weight belongs here."""
        if self.cut is None:
            return whole
        return whole.narrow(self.cut.dim, self.cut.span.start, len(self.cut.span))


class Noted:
    """A source of weights that notes where each was read to."""

    __slots__ = ("_source", "packed", "places")

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.places: dict[str, Place] = {}
        self.packed: set[str] = set()
        """Weights that were read as blocks, and may have been packed: they have no place then."""

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def read(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        self._source.read(name, out, cut)
        self.places[name] = Place(out, cut)

    def blocks(
        self, name: str, shape: tuple[int, int], cut: Cut | None = None
    ) -> StoredBlocks | None:
        found = self._source.blocks(name, shape, cut)
        if found is not None:
            self.packed.add(name)
        return found

    def spared_bytes(self, itemsize: int) -> int:
        return self._source.spared_bytes(itemsize)
