"""The host tier: prefix pages kept in host memory once the device pool has given them away.

Its pool and its index are of the same make as the device's. A page gets in by a copy
from the device and is findable once the copy is acknowledged.

Pages that nobody holds are replaced when others need their place: those that no prompt
ever matched first, the oldest first. It knows digests and blocks, and nothing of requests.
"""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from drumline.contract.cache import BlockMoves, WriteBack
from drumline.core.config import WritePolicy
from drumline.core.errors import InvariantError
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.draft import Draft
from drumline.scheduler.index import NOBODY, IndexArray
from drumline.scheduler.prefix import PrefixIndex
from drumline.scheduler.transfers import Transfers

_MATCHED = 1 << 40
"""Added to the age of a page that a prompt has matched: it outlives all that none has."""

_Part = tuple[bytes, int]
"""A page's digest, and which of its blocks."""


class Pages(Struct, frozen=True, eq=False):
    """Pages by digest, `ends[i]` tokens from the start of their sequence.

    `blocks[g]` has shape [pages, slots of group g], and 0 where there is no block. `priors`
    has what a partial page is filed behind, and is empty for a full page; none, and all are.
    """

    digests: list[bytes]
    ends: IndexArray
    blocks: list[IndexArray]
    priors: list[bytes] = []


class _Given(Struct, eq=False):
    """A page's blocks on the device that are about to be given to others."""

    end: int
    prior: bytes
    blocks: list[IndexArray]


class _Store(Struct, eq=False):
    """Pages that are being copied to host blocks."""

    pages: Pages
    """With the host's blocks."""
    ended: Callable[[bool], None] | None
    wanted: bool = True
    """Whether they are to be findable afterwards."""


class HostTier:
    """What is cached in host memory, and what is on its way there."""

    __slots__ = (
        "_age",
        "_device",
        "_flying",
        "_given",
        "_offered",
        "_pool",
        "_stores",
        "_transfers",
        "back",
        "index",
        "pool",
        "through",
        "told",
    )

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, device: PrefixIndex, transfers: Transfers
    ) -> None:
        """Take over the device's pool and index, which pages come from and go to."""
        self._pool = pool
        self._device = device
        self._transfers = transfers
        self.index = PrefixIndex(config.prefix_granularity, device.slots)
        self.pool = BlockPool(
            config.groups, config.num_host_pages, self.index.forget, self.index.depth
        )
        self.index.watch(self.pool)
        self.through = (
            config.num_host_pages > 1 and config.host_write_policy is WritePolicy.WRITE_THROUGH
        )
        """Whether pages are copied here when they are complete, not when they are given away."""
        self.back = config.num_host_pages > 1 and config.host_write_policy is WritePolicy.WRITE_BACK
        self._age = 0
        self._offered: list[bytes] = []
        self._given: dict[bytes, _Given] = {}
        self._flying: list[set[_Part]] = [set() for _ in device.slots]
        self._stores: list[_Store] = []
        self.told: Callable[[Sequence[bytes], Sequence[IndexArray], int], None] | None = None
        """Learns of full pages that are findable here now, and of the operation that did it."""

    # -- in -----------------------------------------------------------------------

    def offer(self, digests: Sequence[bytes]) -> None:
        """Have the next `store` copy these pages, as far as the device still has them."""
        self._offered += digests

    def given_up(self, group: int, blocks: IndexArray) -> None:
        """Note cached device blocks that are about to be forgotten: `store` copies them."""
        device = self._device
        for block in blocks.tolist():
            node = int(self._pool.node[block])
            digest = device.digest(node)
            given = self._given.get(digest)
            if given is None:
                parts = [np.zeros(slots, np.intp) for slots in device.slots]
                given = _Given(int(device.end[node]), device.prior(node), parts)
                self._given[digest] = given
            slot = device.blocks[group][node].tolist().index(block)
            given.blocks[group][slot] = block

    @property
    def waiting(self) -> bool:
        """Whether `store` has anything to plan."""
        return bool(self._offered or self._given)

    def store(self, draft: Draft) -> None:
        """Plan the copies of what was offered or given up since the last call.

        What is here or on its way is not copied again; what finds no room is dropped.
        """
        if self._offered:
            digests = [one for one in dict.fromkeys(self._offered) if self._device.find(one)]
            self._offered.clear()
            nodes = self._device.anywhere(digests)
            blocks = [part[nodes] for part in self._device.blocks]
            priors = [self._device.prior(node) for node in nodes.tolist()]
            self._write(Pages(digests, self._device.end[nodes], blocks, priors), draft, pinned=True)
        if self._given:
            # The start of a prefix first, so that what finds no room is its end.
            digests = sorted(self._given, key=lambda digest: self._given[digest].end)
            given = [self._given[digest] for digest in digests]
            self._given.clear()
            pages = Pages(
                digests,
                np.array([one.end for one in given], np.intp),
                [
                    np.array([one.blocks[group] for one in given])
                    for group in range(len(self._device.slots))
                ],
                [one.prior for one in given],
            )
            self._write(pages, draft, pinned=False)

    def keep(self, pages: Pages, draft: Draft, ended: Callable[[bool], None]) -> Pages:
        """Hold these pages of a request that is suspended, copying here those that are not.

        Returns them with the host's blocks, 0 where there was no room. If anything is
        copied, `ended` learns of its end; the device's blocks may be given away at once.
        """
        nodes = self.index.anywhere(pages.digests)
        here = [
            np.where(mine > 0, part[nodes], 0)
            for mine, part in zip(pages.blocks, self.index.blocks, strict=True)
        ]
        self.hold(here)
        written = self._write(pages, draft, pinned=False, ended=ended)
        if written is not None:
            self.hold(written)
            here = [old + new for old, new in zip(here, written, strict=True)]
        return Pages(pages.digests, pages.ends, here)

    def visible(self, digests: Sequence[bytes]) -> list[IndexArray]:
        """Return this tier's blocks of pages, shaped as in `Pages`."""
        nodes = self.index.anywhere(digests)
        return [part[nodes] for part in self.index.blocks]

    def _write(
        self,
        pages: Pages,
        draft: Draft,
        *,
        pinned: bool,
        ended: Callable[[bool], None] | None = None,
    ) -> list[IndexArray] | None:
        """Plan one operation for what is not here yet of `pages`; returns its host blocks."""
        if not pages.digests:
            return None
        here = self.visible(pages.digests)
        wanted = []
        for group, (mine, there) in enumerate(zip(pages.blocks, here, strict=True)):
            new = (mine > 0) & (there == 0)
            if self._flying[group]:
                for at, part in zip(*np.nonzero(new), strict=True):
                    new[at, part] = (pages.digests[at], part) not in self._flying[group]
            wanted.append(new)
        # A page must not be replaced by one that is of no use without it.
        self.hold(here)
        targets = self._take(wanted)
        self.release(here)
        if not any(part.any() for part in targets):
            return None
        moves, pins = [], [NOBODY]
        for group, (mine, theirs) in enumerate(zip(pages.blocks, targets, strict=True)):
            which = theirs > 0
            if which.any():
                sources = mine[which]
                moves.append(
                    BlockMoves(
                        group,
                        self._pool.pages(group, sources),
                        self.pool.pages(group, theirs[which]),
                    )
                )
                pins.append(sources)
                self._flying[group].update(_parts(pages.digests, which))
        store = _Store(Pages(pages.digests, pages.ends, targets, pages.priors), ended)
        self._stores.append(store)
        op_id = self._transfers.begin(
            lambda ok: self._stored(store, op_id, ok), np.concatenate(pins) if pinned else NOBODY
        )
        draft.cache(WriteBack(op_id, tuple(moves), pinned))
        return targets

    def _take(self, wanted: list[IndexArray]) -> list[IndexArray]:
        """Return held host blocks where they are wanted, for as many leading pages as fit."""
        targets = [np.zeros(part.shape, np.intp) for part in wanted]
        needs = [int(np.count_nonzero(part)) for part in wanted]
        if not any(needs):
            return targets
        if self.pool.make_room(needs):
            for group, (part, target) in enumerate(zip(wanted, targets, strict=True)):
                target[part] = self.pool.take(group, needs[group])
            return targets
        for page in range(len(wanted[0])):
            needs = [int(np.count_nonzero(part[page])) for part in wanted]
            if not self.pool.make_room(needs):
                break
            for group, (part, target) in enumerate(zip(wanted, targets, strict=True)):
                target[page, part[page]] = self.pool.take(group, needs[group])
        return targets

    def _stored(self, store: _Store, op_id: int, ok: bool) -> None:
        self._stores.remove(store)
        pages = store.pages
        for group, blocks in enumerate(pages.blocks):
            self._flying[group].difference_update(_parts(pages.digests, blocks > 0))
        if ok and store.wanted:
            some = np.logical_or.reduce([(part > 0).any(axis=1) for part in pages.blocks])
            if any(pages.priors):
                partial = np.array([bool(prior) for prior in pages.priors])
                self._publish_tails(pages, np.flatnonzero(some & partial))
                some &= ~partial
            self._publish(pages, some)
            if self.told is not None:
                full = np.flatnonzero(some).tolist()
                digests = [pages.digests[at] for at in full]
                self.told(digests, [part[full] for part in pages.blocks], op_id)
        self._age += 1
        self.release(pages.blocks, self._age)
        if store.ended is not None:
            store.ended(ok)

    def _publish(self, pages: Pages, which: NDArray[np.bool_]) -> None:
        """Make `which` of these full pages findable."""
        self.index.publish(
            [pages.digests[at] for at in np.flatnonzero(which).tolist()],
            pages.ends[which],
            [part[which].reshape(-1) for part in pages.blocks],
        )

    def _publish_tails(self, pages: Pages, which: IndexArray) -> None:
        """Make `which` of these pages findable, which are partial."""
        for at in which.tolist():
            _node, dropped = self.index.publish_tail(
                pages.priors[at],
                pages.digests[at],
                int(pages.ends[at]),
                [part[at] for part in pages.blocks],
            )
            for blocks in dropped:
                if len(blocks):
                    self.pool.uncached(blocks)

    # -- who holds what -----------------------------------------------------------

    def hold(self, blocks: Sequence[IndexArray]) -> None:
        """Hold findable blocks, a group an entry, once more; 0 stands for none."""
        for part in blocks:
            self.pool.hold(part[part > 0])

    def release(self, blocks: Sequence[IndexArray], age: int = 0) -> None:
        """Release one hold of each; they are as old as the newest `age`."""
        for part in blocks:
            held = part[part > 0]
            if len(held):
                self.pool.release(held, age)

    # -- for storage ----------------------------------------------------------------

    def block(self, digest: bytes, group: int, part: int) -> int:
        """Return the block that this tier has of a page, 0 where it has none."""
        return int(self.index.blocks[group][self.index.find(digest), part])

    def adopt(self, pages: Pages) -> IndexArray:
        """Make held blocks findable that were filled from elsewhere.

        Returns the findable blocks of the same contents, held once more.
        """
        some = np.logical_or.reduce([(part > 0).any(axis=1) for part in pages.blocks])
        self._publish(pages, some)
        here = self.visible(pages.digests)
        found = [part[mine > 0] for part, mine in zip(here, pages.blocks, strict=True)]
        held: IndexArray = np.concatenate(found)
        self.pool.hold(held)
        return held

    def let_go_of(self, blocks: IndexArray, *, matched: bool = False) -> None:
        """Release blocks that somebody wrote or read; they are as new as any here.

        Those that a prompt has `matched` outlive all that none has.
        """
        self._age += 1
        self.pool.release(blocks, self._age + _MATCHED if matched else self._age)

    # -- when all is to go ---------------------------------------------------------

    def disown(self) -> None:
        """Forget every page, those on their way as well; what is held stays until let go."""
        self.pool.disown()
        for store in self._stores:
            store.wanted = False
        self.discard()

    def discard(self) -> None:
        """Forget what the next `store` would copy."""
        self._offered.clear()
        self._given.clear()

    def check(self, others: Sequence[IndexArray]) -> None:
        """Raise InvariantError unless each block is free, cached, or held by a store or one of
        `others`: loads, images and storage."""
        self.pool.check()
        self.index.check(self.pool)
        held = np.zeros_like(self.pool.refs)
        for blocks in others:
            np.add.at(held, blocks[blocks > 0], 1)
        for store in self._stores:
            for blocks in store.pages.blocks:
                np.add.at(held, blocks[blocks > 0], 1)
        if not np.array_equal(held, self.pool.refs):
            raise InvariantError("a host block's holds are not those of its holders")


def _parts(digests: Sequence[bytes], which: NDArray[np.bool_] | np.bool_) -> list[_Part]:
    pages, slots = np.nonzero(which)
    return [(digests[at], part) for at, part in zip(pages.tolist(), slots.tolist(), strict=True)]
