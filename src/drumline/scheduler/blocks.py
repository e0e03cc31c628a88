"""The device pool: parents, the blocks that groups cut from them, and who holds them.

One pool of equally sized parents serves all groups; parent 0 is the null page. A
group packs `blocks_per_parent` blocks into a parent, which belongs to that group
from its first block to its last. Inside the scheduler all groups' blocks are
numbered in one space, so that one array says how often each is held; 0 is the
null block of every group. `pages` translates to a group's own page ids.

A block is free, held (by tables or transfers), or cached and held by nobody; the
last are given up in eviction order when room is needed. The pool does not know
what a cached block holds: it tells `forget` which ones it gives up.
"""

from collections.abc import Callable, Sequence

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.contract.census import PoolCensus
from drumline.contract.specs import CacheGroup
from drumline.core.errors import InvariantError
from drumline.scheduler.eviction import EvictionOrder
from drumline.scheduler.index import ONE, ZERO, IndexArray, blank, every, scalar
from drumline.scheduler.parents import Parents, Trial


class BlockPool:
    """Parents 1 … num_parents-1 and the groups' blocks in them."""

    __slots__ = (
        "_bases",
        "_forget",
        "_order",
        "_parents",
        "base",
        "epoch",
        "evictable",
        "group_of",
        "node",
        "num_parents",
        "packing",
        "refs",
        "releases",
    )

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_parents: int,
        forget: Callable[[int, IndexArray], None],
        depth: Callable[[IndexArray], IndexArray],
    ) -> None:
        self.num_parents = num_parents
        self.packing = [group.blocks_per_parent for group in groups]
        sizes = [(num_parents - 1) * packing for packing in self.packing]
        self.base = [sum(sizes[:index]) for index in range(len(sizes))]
        self._bases = [scalar(base) for base in self.base]
        total = sum(sizes) + 1
        self.refs: IndexArray = blank(total)
        self.node: IndexArray = blank(total)
        """The boundary of the prefix index that a cached block belongs to, else 0."""
        self.epoch: IndexArray = blank(total)
        self.group_of = np.zeros(total, np.int8)
        for index, (base, size) in enumerate(zip(self.base, sizes, strict=True)):
            self.group_of[base + 1 : base + 1 + size] = index
        self.evictable = 0
        self.releases = 0
        """Grows whenever blocks become free or evictable; waiting for room watches it."""
        self._forget = forget
        self._parents = Parents(self.packing, num_parents)
        self._order = EvictionOrder(depth, self._live)

    # -- what there is ------------------------------------------------------------

    @property
    def empty(self) -> int:
        """Parents that hold nothing."""
        return len(self._parents.free)

    def pages(self, group: int, blocks: IndexArray) -> IntArray:
        """Return the group's own page ids of `blocks`, as plans carry them; null stays null."""
        base = self.base[group]
        return (np.where(blocks > ZERO, blocks - base, ZERO) if base else blocks).astype(np.int32)

    def parents(self, blocks: IndexArray) -> IndexArray:
        """Return the distinct parents of `blocks`, null left out."""
        blocks = blocks[blocks > 0]
        groups = self.group_of[blocks]
        packing = np.array(self.packing)[groups]
        base = np.array(self.base)[groups]
        return np.unique((blocks - base - 1) // packing + 1)

    def fits(self, needs: Sequence[int]) -> bool:
        """Whether `needs[g]` blocks of every group can be taken without giving up any."""
        return self._parents.fits(needs)

    # -- taking and giving back ---------------------------------------------------

    def make_room(self, needs: Sequence[int]) -> bool:
        """Give up as few cached blocks as needed for `needs`; False, and nothing happened."""
        if self.fits(needs):
            return True
        if not self.evictable:
            return False
        if len(self.packing) == 1 and self.packing[0] == 1:
            short = needs[0] - len(self._parents.free)
            if short > self.evictable:
                return False
            self._evict(self._order.pop(short))
            return True
        return self._make_packed_room(needs)

    def take(self, group: int, count: int) -> IndexArray:
        """Take `count` blocks of a group, each held once. `fits` must have said yes."""
        blocks = self._parents.take(group, count)
        if self.base[group]:
            blocks += self.base[group]
        self.refs[blocks] = ONE
        return blocks

    def take_each(self, counts: Sequence[int]) -> tuple[IndexArray, IntArray]:
        """Take `counts[g]` blocks of the first groups; return them, group after group, and pages.

        They are held once each. `fits` must have said yes.
        """
        blocks = self._parents.take_each(counts)
        pages, first = blocks.astype(np.int32), 0
        for group, count in enumerate(counts):
            if group and count:
                blocks[first : first + count] += self._bases[group]
            first += count
        self.refs[blocks] = ONE
        return blocks, pages

    def take_one(self, group: int) -> tuple[int, int]:
        """Take one block of a group, and return it with the group's own page id for it."""
        page = self._parents.take_one(group)
        block = self.base[group] + page
        self.refs[block] = 1
        return block, page

    def hold(self, blocks: IndexArray) -> None:
        """Hold `blocks`, distinct and cached or held already, once more."""
        refs = self.refs[blocks]
        self.evictable -= len(refs) - int(np.count_nonzero(refs))
        self.refs[blocks] = refs + ONE

    def release(self, blocks: IndexArray, epoch: int | IndexArray = 0) -> None:
        """Release one hold of each of `blocks`, which are distinct and not null.

        `epoch` is the admission whose hold it was; a block is as old as its newest hold.
        """
        self._release(blocks, epoch, self.refs[blocks])

    def _release(self, blocks: IndexArray, epoch: int | IndexArray, refs: IndexArray) -> None:
        epochs = self.epoch[blocks] = np.maximum(self.epoch[blocks], epoch)
        refs = self.refs[blocks] = refs - ONE
        idle = refs == ZERO
        if not every(idle):
            blocks, epochs = blocks[idle], epochs[idle]
            if not len(blocks):
                return
        self.releases += 1
        cached = self.node[blocks] > ZERO
        if not every(cached):
            self._put(blocks[~cached])
            blocks, epochs = blocks[cached], epochs[cached]
        if len(blocks):
            self._file(blocks, epochs)

    def release_all(self, blocks: IndexArray, epochs: IndexArray) -> None:
        """Do what `release` does, of blocks that may be named more than once."""
        refs = self.refs[blocks]
        if every(refs == ONE) or len(set(blocks.tolist())) == len(blocks):
            self._release(blocks, epochs, refs)
            return
        for at in range(len(blocks)):
            self.release(blocks[at : at + 1], epochs[at : at + 1])

    # -- the cache's side ---------------------------------------------------------

    def uncached(self, blocks: IndexArray) -> None:
        """Free those of `blocks`, cached until now, that nobody holds."""
        idle = blocks[self.refs[blocks] == 0]
        if len(idle):
            self.evictable -= len(idle)
            self.releases += 1
            self._put(idle)

    def _file(self, blocks: IndexArray, epochs: IndexArray) -> None:
        self.evictable += len(blocks)
        self._order.file(blocks, epochs, self.evictable)

    def _live(self, blocks: IndexArray, epoch: int) -> IndexArray:
        live = (self.refs[blocks] == 0) & (self.node[blocks] > 0) & (self.epoch[blocks] == epoch)
        alive: IndexArray = blocks[live]
        return alive

    def _evict(self, blocks: IndexArray) -> None:
        if len(self.packing) == 1:
            self._forget(0, blocks)
        else:
            groups = self.group_of[blocks]
            for group in range(len(self.packing)):
                mine = blocks[groups == group]
                if len(mine):
                    self._forget(group, mine)
        self.evictable -= len(blocks)
        self._put(blocks)

    def _put(self, blocks: IndexArray) -> None:
        self.epoch[blocks] = 0
        if len(self.packing) == 1:
            self._parents.put(0, blocks)
            return
        groups = self.group_of[blocks]
        for group, base in enumerate(self.base):
            mine = blocks[groups == group]
            if len(mine):
                self._parents.put(group, mine - base if base else mine)

    def _make_packed_room(self, needs: Sequence[int]) -> bool:
        """Choose victims in eviction order until `needs` fit, then spare those not needed."""
        trial = Trial(self._parents, needs)
        victims: list[int] = []
        while not trial.fits():
            block = self._order.pop(1)
            if not len(block):
                break
            victims.append(int(block[0]))
            trial.give_up(*self._place(victims[-1]))
        if not victims:
            return False
        if trial.fits():
            chosen = [block for block in reversed(victims) if not trial.spare(*self._place(block))]
        else:
            chosen = []
        given = set(chosen)
        spared = np.array([block for block in victims if block not in given], np.intp)
        if len(spared):
            self.evictable -= len(spared)
            self._file(spared, self.epoch[spared])
        if chosen:
            self._evict(np.array(chosen[::-1]))
        return bool(chosen)

    def _place(self, block: int) -> tuple[int, int]:
        """Return a block's group, and the page id that it has there."""
        group = int(self.group_of[block])
        return group, block - self.base[group]

    # -- proof --------------------------------------------------------------------

    def clear(self) -> None:
        """Give up every cached block that nobody holds."""
        blocks = self._order.waiting()
        if len(blocks):
            self._evict(blocks)
            self.releases += 1
        self._order.clear()

    def disown(self) -> None:
        """Stop caching every block; those that somebody holds are that holder's alone."""
        blocks = self.cached_blocks()
        groups = self.group_of[blocks]
        for group in range(len(self.packing)):
            mine = blocks[groups == group]
            if len(mine):
                self._forget(group, mine)
        self.uncached(blocks)
        self._order.clear()

    def active_parents(self) -> int:
        """Return how many parents have a block that is held."""
        if len(self.packing) == 1 and self.packing[0] == 1:
            return self.num_parents - 1 - self.empty - self.evictable
        return len(self.parents(np.flatnonzero(self.refs)))

    def census(self) -> PoolCensus:
        """Count parents by what their blocks say; not by what should be where."""
        held = self.parents(np.flatnonzero(self.refs))
        findable = self.parents(np.flatnonzero(self.node))
        cached = len(np.setdiff1d(findable, held, assume_unique=True))
        return PoolCensus(self.num_parents - 1, len(held), cached, self.empty)

    def cached_and_held(self) -> bool:
        return bool(((self.node > 0) & (self.refs > 0)).any())

    def cached_blocks(self) -> IndexArray:
        return np.flatnonzero(self.node)

    def check(self) -> None:
        """Raise InvariantError unless every parent and block is accounted for."""
        if (self.refs < 0).any() or self.refs[0] or self.node[0]:
            raise InvariantError("a block is released more often than held, or null is held")
        out = np.flatnonzero((self.refs > 0) | (self.node > 0))
        free = self._parents.free.ids()
        owned = self.parents(out)
        if len(np.unique(free)) != len(free) or len(np.intersect1d(free, owned)):
            raise InvariantError("a parent is free twice, or free and in use")
        if len(free) + len(owned) != self.num_parents - 1:
            raise InvariantError(
                f"{self.num_parents - 1 - len(free) - len(owned)} parents are lost"
            )
        idle = out[self.refs[out] == 0]
        if len(idle) != self.evictable:
            raise InvariantError(f"{self.evictable} blocks count as evictable, {len(idle)} are")
        if not np.array_equal(np.sort(self._order.waiting()), idle):
            raise InvariantError("a cached block that nobody holds cannot be given up")
        for group, packing in enumerate(self.packing):
            if packing > 1:
                pages = out[self.group_of[out] == group] - self.base[group]
                self._parents.check(group, pages)
