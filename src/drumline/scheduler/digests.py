"""The digests of a prompt's pages, as they came: bytes in a line.

Thousands of them would cost an object each before anybody asks; what is asked for becomes
bytes of its own then.
"""

from collections.abc import Sequence
from typing import overload

import numpy as np

from drumline.core.hashing import DIGEST_BYTES

DIGEST = np.dtype(f"V{DIGEST_BYTES}")
"""A digest as an array's element."""

_WORDS = DIGEST_BYTES // 8


class Digests(Sequence[bytes]):
    """A sequence of digests; a slice of it is a list."""

    __slots__ = ("_array", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._array = np.frombuffer(data, DIGEST)

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            part: list[bytes] = self._array[at].tolist()
            return part
        start = (at if at >= 0 else at + len(self._array)) * DIGEST_BYTES
        # Cheaper than an element of the array, which is an object of its own first.
        one = self._data[start : start + DIGEST_BYTES] if start >= 0 else b""
        if not one:
            raise IndexError(f"{at} of {len(self._array)} digests")
        return one

    def alike(self, first: int, others: np.ndarray[tuple[int], np.dtype[np.void]]) -> int:
        """Return how many from `first` on are those of `others`, up to one that is not."""
        start = first * DIGEST_BYTES
        mine = self._data[start : start + len(others) * DIGEST_BYTES]
        if mine == others.tobytes():
            return len(others)
        same = np.frombuffer(mine, np.uint64) == others.view(np.uint64)[: len(mine) // 8]
        return int(np.argmin(same)) // _WORDS


NO_DIGESTS = Digests(b"")
