"""The pages that forwards of the fake plane read and write, as block tables lead to them.

The tables change by plans' patches alone. Positions behind a wrong one are garbage, or
somebody else's, and so is what a query sees of them.
"""

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.contract.plan import Plan
from drumline.contract.specs import DeviceSpecs
from drumline.replay.arithmetic import Entries, entry, weights
from drumline.replay.tiers import GARBAGE, PagedTiers


class Pages:
    """Block tables of every group, and the entries of a device's blocks."""

    def __init__(self, specs: DeviceSpecs, tiers: PagedTiers) -> None:
        """Begin with empty tables over the device's blocks in `tiers`."""
        self._tiers = tiers
        self._slots = tiers.device
        self._block_tokens = [group.block_tokens for group in specs.groups]
        self._tables = [
            np.zeros(
                (specs.max_rows + 1, -(-specs.model.max_model_len // tokens) + 1),
                np.int32,
            )
            for tokens in self._block_tokens
        ]
        self._weights = weights(specs.model.max_model_len + 1)

    def prepare(self, plan: Plan) -> None:
        """Carry out what a plan has before its forward, in the order that it must have."""
        self._tiers.store(plan.cache_ops)
        for copies in plan.copies:
            slots = self._slots[copies.group]
            slots[copies.targets] = slots[copies.sources]
        for zeroes in plan.zeroes:
            self._slots[zeroes.group][zeroes.blocks] = 0
        self._tiers.load(plan.cache_ops)
        for patch in plan.patches:
            self._tables[patch.group][patch.rows, patch.columns] = patch.blocks

    def write(self, row: int, before: int, feed: list[int]) -> None:
        """Write the entries of a row's tokens from position `before` on."""
        for table, slots, size in zip(self._tables, self._slots, self._block_tokens, strict=True):
            last = before - 1
            value = int(slots[table[row, last // size], last % size]) if before else 0
            for position, token in enumerate(feed, before):
                value = entry(value, token)
                slots[table[row, position // size], position % size] = value

    def seen(self, row: int, length: int) -> int:
        """Return what a query behind `length` positions sees of them; all groups must agree."""
        seen = {
            _weigh(table[row], slots, size, length, self._weights)
            for table, slots, size in zip(
                self._tables, self._slots, self._block_tokens, strict=True
            )
        }
        return seen.pop() if len(seen) == 1 else GARBAGE


def _weigh(columns: IntArray, slots: Entries, size: int, length: int, weight: Entries) -> int:
    blocks = columns[: -(-length // size)]
    entries = slots[blocks].reshape(-1)[:length]
    return int((entries * weight[:length]).sum(dtype=np.uint64))
