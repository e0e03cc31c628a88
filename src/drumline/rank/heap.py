"""Keeping the garbage collector off the rounds."""

import gc

_YOUNG = 700
_MIDDLE = 10
_OLD = 1000
"""Middle collections between two full ones: a full one stalls every thread of the process."""


def freeze_heap() -> None:
    """Collect what start-up left, exempt what survives, and make full collections rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
