"""What prompts read back from the host tier: copies to the device, under way and failed.

A page that a prompt matches in the host tier is copied to device blocks that the plan
allocates for it, and is cached on the device from then on. A partial page, a tail, is
copied to its reader's own blocks, which would be a copy of the cached ones otherwise. It
knows matches, and of requests the number they were submitted as.
"""

from collections.abc import Sequence

import numpy as np

from drumline.contract.cache import BlockMoves, LoadBack
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.draft import Draft
from drumline.scheduler.host import HostTier
from drumline.scheduler.index import NOBODY, IndexArray
from drumline.scheduler.match import Match
from drumline.scheduler.prefix import PrefixIndex
from drumline.scheduler.transfers import Transfers


class Loads:
    """Copies from the host tier to the device."""

    __slots__ = (
        "_device",
        "_failed",
        "_failed_readers",
        "_host",
        "_index",
        "_sources",
        "_transfers",
    )

    def __init__(
        self, host: HostTier, device: BlockPool, index: PrefixIndex, transfers: Transfers
    ) -> None:
        """`index` is that of `device`."""
        self._host = host
        self._device = device
        self._index = index
        self._transfers = transfers
        self._sources: dict[int, IndexArray] = {}
        """By operation, the host's blocks, which are held until it has ended."""
        self._failed: set[bytes] = set()
        self._failed_readers: set[int] = set()

    def hold(self, match: Match) -> None:
        """Keep what a match found in the tier until it is loaded, or let go."""
        self._host.hold(match.host)
        self._host.hold(match.host_tails)

    def let_go(self, match: Match) -> None:
        self._host.release(match.host)
        self._host.release(match.host_tails)

    def place(self, match: Match, digests: Sequence[bytes]) -> None:
        """Give a match, which is held, device blocks for what it found in the tier of pages.

        The pool has the room. They are held once, and cached from now on.
        """
        some = np.zeros(match.pages, bool)
        for group, theirs in enumerate(match.host):
            which = theirs > 0
            if which.any():
                blocks = self._device.take(group, int(np.count_nonzero(which)))
                match.blocks[group][which] = blocks
                some |= which.reshape(match.pages, -1).any(axis=1)
        pages = np.flatnonzero(some)
        self._index.publish(
            [digests[page] for page in pages.tolist()],
            (pages + 1) * self._index.page_tokens,
            [part.reshape(match.pages, -1)[pages].reshape(-1) for part in match.blocks],
        )

    def load(
        self,
        match: Match,
        tail: Sequence[IndexArray],
        digests: Sequence[bytes],
        reader: int,
        draft: Draft,
    ) -> None:
        """Plan the copies of what a match, which is held and placed, found in the tier.

        A tail goes to the blocks `tail`, shaped as the match's, of the request that was
        submitted as number `reader`: nobody else reads them.
        """
        moves, sources, targets = [], [], []
        for group in range(len(self._index.slots)):
            theirs, mine = NOBODY, NOBODY
            if match.host:
                theirs, mine = match.host[group], match.blocks[group]
            if match.host_tails:
                theirs = np.concatenate((theirs, match.host_tails[group]))
                mine = np.concatenate((mine, tail[group]))
            which = theirs > 0
            if which.any():
                sources.append(theirs[which])
                targets.append(mine[which])
                pages = self._host.pool.pages(group, sources[-1])
                moves.append(BlockMoves(group, pages, self._device.pages(group, targets[-1])))
        op_id = self._transfers.begin(
            lambda ok: self._loaded(op_id, digests[: match.pages], reader, ok),
            np.concatenate(targets),
        )
        self._sources[op_id] = np.concatenate(sources)
        draft.cache(LoadBack(op_id, tuple(moves)))

    def _loaded(self, op_id: int, digests: Sequence[bytes], reader: int, ok: bool) -> None:
        self._host.let_go_of(self._sources.pop(op_id), matched=True)
        if not ok:
            self._failed.update(digests)
            self._failed_readers.add(reader)

    @property
    def oldest(self) -> float:
        """The oldest operation under way: what later ones stored may build on its pages."""
        return next(iter(self._sources), float("inf"))

    @property
    def failed(self) -> bool:
        """Whether pages that a prompt was to read did not reach the device."""
        return bool(self._failed or self._failed_readers)

    def take_failed(self) -> tuple[set[bytes], set[int]]:
        """Return the digests of such pages, and who was to read a tail; forget both."""
        failed, readers = self._failed, self._failed_readers
        self._failed, self._failed_readers = set(), set()
        return failed, readers

    def held(self) -> list[IndexArray]:
        """Return the host's blocks that operations read, an operation an entry."""
        return list(self._sources.values())
