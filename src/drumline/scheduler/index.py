"""The arrays the scheduler works with inside.

Rows and blocks index arrays all the time, and numpy indexes by its native integer
several times faster than by int32; so inside they are native, and become int32 where
a plan carries them. An operand that is an array, if of no dimension, also spares a
conversion that costs as much as the operation.
"""

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.intp]

NOBODY: IndexArray = np.empty(0, np.intp)
NOBODY.flags.writeable = False

ZERO: IndexArray = np.array(0, np.intp)
ONE: IndexArray = np.array(1, np.intp)
ZERO.flags.writeable = ONE.flags.writeable = False
