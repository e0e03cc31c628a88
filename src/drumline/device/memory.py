"""Large memory of this process: where pools of blocks lie.

On a CPU it is mapped afresh in huge pages, which costs nothing until it is touched and
saves most of what scattered blocks cost in address translation. It knows nothing of
what is kept in it.
"""

import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20


def host_memory(size: int) -> Tensor:
    """Return `size` zero bytes of host memory, uint8.

    Raises OSError where the system has no address space for it.
    """
    rounded = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    # Private, as shared anonymous memory gets no huge pages by default.
    mapped = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive.
    return torch.frombuffer(mapped, dtype=torch.uint8, count=size)


def device_memory(size: int, device: torch.device) -> Tensor:
    """Return `size` zero bytes of a device's memory, uint8."""
    if device.type == "cpu":
        return host_memory(size)
    return torch.zeros(size, dtype=torch.uint8, device=device)
