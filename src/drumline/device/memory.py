"""Large memory of this process: where pools of blocks and weights lie.

On a CPU it is mapped afresh in huge pages, which costs nothing until it is touched and
saves most of what scattered blocks cost in address translation. On CUDA it is torch's, of
which the system gets nothing back before torch is told. It knows nothing of what is kept in it.
"""

import mmap
import sys
from typing import Protocol

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_CPU = torch.device("cpu")


class File(Protocol):
    """What is needed of a file that keeps bytes."""

    def write(self, buffer: memoryview, /) -> int: ...

    def readinto(self, buffer: memoryview, /) -> int | None: ...


class Memory:
    """Zero bytes of a device's memory, which the system can have back while nobody needs them.

    Raises OSError, or on a device RuntimeError, where there is no room for them.
    """

    __slots__ = ("_mapped", "_size", "bytes")

    def __init__(self, size: int, device: torch.device = _CPU) -> None:
        self._size = size
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
            return None
        # Elsewhere the advice is taken or left, and says nothing of zeros.
        return None if sys.platform == "linux" else f"{sys.platform} takes no memory back in parts"

    def write_to(self, file: File, size: int) -> None:
        """Write the first bytes to a file. Waits for the device. Raises OSError."""
        if self._mapped is not None:
            file.write(memoryview(self._mapped)[:size])
        else:
            held = torch.empty(size, dtype=torch.uint8).copy_(self.bytes[:size])
            file.write(held.numpy().data)

    def read_from(self, file: File, size: int) -> bool:
        """Read the first bytes from a file; returns whether it held as many."""
        if self._mapped is not None:
            return file.readinto(memoryview(self._mapped)[:size]) == size
        held = torch.empty(size, dtype=torch.uint8)
        whole = file.readinto(held.numpy().data) == size
        self.bytes[:size].copy_(held)
        return whole

    def give_back(self) -> None:
        """Return the memory to the system. On a CPU it stays where it was, and may be used.

        On a device nothing may touch it before `take_back`, and `trim` completes it.
        """
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)
        else:
            # Every view is one of this storage, and finds it again when it has grown back.
            self.bytes.untyped_storage().resize_(0)

    def take_back(self) -> None:
        """Take given-back memory again, all zeros; on a device it may lie elsewhere than before.

        Raises RuntimeError, on a device, where others have it by now.
        """
        storage = self.bytes.untyped_storage()
        if self._mapped is None and not storage.nbytes():
            storage.resize_(self._size)
            self.bytes.zero_()


def settle(device: torch.device) -> None:
    """Wait until a device has done all that was queued, on whichever stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trim(device: torch.device) -> None:
    """Let the system have what this process keeps of a device's memory for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def host_memory(size: int, device: torch.device = _CPU) -> Tensor:
    """Return `size` zero bytes of host memory, uint8, that a device copies from and to.

    Beside a CPU they lie in huge pages, beside CUDA in pinned ones. Raises OSError or
    RuntimeError where the system has no room for them.
    """
    memory = Memory(size).bytes
    if device.type == "cuda":
        # As it is, for torch's own pinned memory takes the next power of two.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's has no types
        fault = int(runtime.cudaHostRegister(memory.data_ptr(), size, 0))
        if fault:
            raise RuntimeError(f"{size} bytes of host memory cannot be pinned: CUDA error {fault}")
    return memory
