"""What of a prompt was found cached, as a value."""

import numpy as np
from msgspec import Struct

from drumline.scheduler.index import IndexArray


class Match(Struct, frozen=True, eq=False):
    """What of a prompt is cached: `pages` full pages, `tokens` with a tail behind them.

    `blocks[g]` are the pages' blocks, null where the group does not look back to;
    `tails[g]` are the tail's, without those. Of a state group, which looks back on its
    boundary alone, they are null but for the block there. `reach` is how far full groups
    alone would get, `paged` how far all but state groups would, in tokens of full pages.
    """

    pages: int
    tokens: int
    reach: int
    paged: int
    blocks: list[IndexArray]
    tails: list[IndexArray]
    host: list[IndexArray] = []
    """Shaped as `blocks`: the host tier's blocks of what is not on the device; else empty."""
    host_tails: list[IndexArray] = []
    """The same of the tail: shaped as `tails`."""

    def carried(self, first: int) -> list[int]:
        """Return the block that each group from `first` on has at the boundary: state groups.

        It is 0 where the host tier has it; there are none at the start of a sequence.
        """
        parts = self.tails or self.blocks
        return [int(part[-1]) for part in parts[first:] if len(part)]

    @property
    def loads(self) -> list[int]:
        """Blocks of each group that the host tier has of what the device lacks."""
        return [int(np.count_nonzero(part)) for part in self.host]

    @property
    def host_pages(self) -> int:
        """Pages that the host tier has something of that the device lacks."""
        some = [(part.reshape(self.pages, -1) > 0).any(axis=1) for part in self.host]
        return int(np.count_nonzero(np.logical_or.reduce(some))) if some else 0


NO_MATCH = Match(0, 0, 0, 0, [], [])
