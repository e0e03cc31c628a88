"""Large memory of this process: where pools of blocks and weights lie.

On a CPU it is mapped afresh in huge pages, which costs nothing until it is touched and
saves most of what scattered blocks cost in address translation. It knows nothing of
what is kept in it.
"""

import mmap
import sys

import torch
from torch import Tensor

from drumline.core.errors import InvariantError

_HUGE_PAGE = 2 << 20
_CPU = torch.device("cpu")


class Memory:
    """Zero bytes of a device's memory, which the system can have back while nobody needs them.

    Raises OSError, or on a device RuntimeError, where there is no room for them.
    """

    __slots__ = ("_mapped", "bytes")

    def __init__(self, size: int, device: torch.device = _CPU) -> None:
        self._mapped: mmap.mmap | None = None
        if device.type != "cpu":
            self.bytes = torch.zeros(size, dtype=torch.uint8, device=device)
            return
        rounded = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        # Private, as shared anonymous memory gets no huge pages by default.
        self._mapped = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapped.madvise(mmap.MADV_HUGEPAGE)
        # The tensor keeps the mapping alive.
        self.bytes = torch.frombuffer(self._mapped, dtype=torch.uint8, count=size)
        """All of them, as a tensor."""

    @property
    def why_kept(self) -> str | None:
        """Why it cannot be given back, if so."""
        if self._mapped is None:
            return f"memory of {self.bytes.device} is not given back in this version"
        # Elsewhere the advice is taken or left, and says nothing of zeros.
        return None if sys.platform == "linux" else f"{sys.platform} takes no memory back in parts"

    def first(self, size: int) -> memoryview:
        """Return the first bytes, for reading and writing files."""
        if self._mapped is None:
            raise InvariantError("a device's memory is read as a file's would be")
        return memoryview(self._mapped)[:size]

    def give_back(self) -> None:
        """Return the memory to the system. It stays where it was, all zeros, and may be used."""
        if self._mapped is None:
            raise InvariantError("memory is given back that cannot be")
        self._mapped.madvise(mmap.MADV_DONTNEED)


def host_memory(size: int, device: torch.device = _CPU) -> Tensor:
    """Return `size` zero bytes of host memory, uint8, that a device copies from and to.

    Beside a CPU they lie in huge pages, beside CUDA in pinned ones. Raises OSError or
    RuntimeError where the system has no room for them.
    """
    if device.type == "cuda":
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    return Memory(size).bytes
