"""Arrays inside values: how they are typed and how they cross a process border.

A value holds one-dimensional int32 or float32 arrays, and whoever is handed one
never writes to it. Encoded, an array is its raw little-endian bytes.
"""

from typing import Any, get_args

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

NO_INTS: IntArray = np.empty(0, np.int32)
NO_INTS.flags.writeable = False


def encode_array(value: Any) -> bytes:
    """Encode an array; the `enc_hook` of every codec of values."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} does not cross a process border")


def decode_array(kind: Any, data: Any) -> Any:
    """Decode an array of type `kind`; the `dec_hook` of every codec of values."""
    element = get_args(get_args(kind)[1])[0]
    if element not in (np.int32, np.float32) or not isinstance(data, bytes):
        raise NotImplementedError(f"cannot decode {kind}")
    return np.frombuffer(data, element)
