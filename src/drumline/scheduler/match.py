"""What of a prompt was found cached, as a value."""

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


NO_MATCH = Match(0, 0, 0, [], [])
