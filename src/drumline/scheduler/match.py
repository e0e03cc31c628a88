"""What of a prompt was found cached, as a value."""

import numpy as np
from msgspec import Struct

from drumline.scheduler.index import IndexArray


class Match(Struct, frozen=True, eq=False):
    """What of a prompt is cached: `pages` full pages, `tokens` with a tail behind them.

    `blocks[g]` are the pages' blocks, null where the group does not look back to;
    `tails[g]` are the tail's, without those. `reach` is how far full groups alone would
    get, in tokens.
    """

    pages: int
    tokens: int
    reach: int
    blocks: list[IndexArray]
    tails: list[IndexArray]
    host: list[IndexArray] = []
    """Shaped as `blocks`: the host tier's blocks of what is not on the device; else empty."""

    @property
    def loads(self) -> list[int]:
        """Blocks of each group that the host tier has of what the device lacks."""
        return [int(np.count_nonzero(part)) for part in self.host]

    @property
    def host_pages(self) -> int:
        """Pages that the host tier has something of that the device lacks."""
        some = [(part.reshape(self.pages, -1) > 0).any(axis=1) for part in self.host]
        return int(np.count_nonzero(np.logical_or.reduce(some))) if some else 0


NO_MATCH = Match(0, 0, 0, [], [])
