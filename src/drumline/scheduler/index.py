"""The arrays the scheduler works with inside.

Rows and blocks index arrays all the time, and numpy indexes by its native integer
several times faster than by int32; so inside they are native, and become int32 where
a plan carries them. An operand that is an array, if of no dimension, also spares a
conversion that costs as much as the operation.
"""

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.intp]

FEW = 3
"""Up to so many rows or blocks, looking at one after the other is cheaper than an array is."""

NOBODY: IndexArray = np.empty(0, np.intp)
NOBODY.flags.writeable = False


def scalar(value: int) -> IndexArray:
    """Return `value` as an operand of arrays."""
    array: IndexArray = np.array(value, np.intp)
    array.flags.writeable = False
    return array


def blank(*shape: int) -> IndexArray:
    """Return zeros in memory that was touched: its first touch would be a round's to pay.

    Numpy asks for large pages, and the system may take longer to find one than a round takes.
    """
    return np.full(shape, 0, np.intp)


ZERO = scalar(0)
ONE = scalar(1)


def every(mask: npt.NDArray[np.bool_]) -> bool:
    """Whether all of `mask` is true; of few elements, sooner known than numpy says it."""
    return b"\0" not in mask.tobytes()


def some(mask: npt.NDArray[np.bool_]) -> bool:
    """Whether any of `mask` is true; of few elements, sooner known than numpy says it."""
    return b"\1" in mask.tobytes()
