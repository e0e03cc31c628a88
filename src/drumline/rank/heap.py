"""Keeping the garbage collector off the rounds.

A full collection walks every object and stalls every thread of the process; as a round waits for
all ranks, one rank's stall is everybody's. So what start-up leaves is never walked again, and
full collections are run by the data plane alone, in rounds that are the same on every rank.
Young objects are collected as always.
"""

import gc

_YOUNG = 700
_MIDDLE = 10
_NEVER = 1 << 30


def suspend_collections() -> None:
    """Collect nothing while modules and weights are loaded, which make next to no garbage."""
    gc.disable()


def freeze_modules() -> None:
    """Exempt what loading modules left, uncollected: next to nothing of it is garbage."""
    gc.freeze()


def freeze_heap() -> None:
    """Collect what start-up left and exempt what survives; no full collection begins by itself."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
    gc.enable()
