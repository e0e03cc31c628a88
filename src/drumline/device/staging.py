"""Values on their way between host and device, for which the forward thread does not wait.

On a CPU both are one memory: nothing is copied, and nothing is on its way. On CUDA, values go
through pinned memory, which torch's allocator gives to nobody else before the copies that read or
write it are over: it notes each of them with its stream.

Thread: forward thread, but for `Download.wait`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

_ALIGNED = 16


def pinned(size: int) -> Tensor:
    """Return `size` bytes of host memory that CUDA copies from and to by itself, uint8."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def on_device(device: torch.device, array: Array) -> Tensor:
    """Return host values as a tensor of a device; on a CPU it is the array's own memory."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    return all_on_device(device, array)[0]


def all_on_device(device: torch.device, *arrays: Array) -> tuple[Tensor, ...]:
    """Return several arrays as tensors of a device, which one copy brings there."""
    if device.type == "cpu":
        return tuple(map(torch.from_numpy, arrays))
    starts, size = _places([array.nbytes for array in arrays])
    staged = pinned(size)
    held = staged.numpy()
    for array, start in zip(arrays, starts, strict=True):
        held[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = staged.to(device, non_blocking=True)
    return tuple(
        there[start : start + array.nbytes].view(_DTYPES[array.dtype.type]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    )


class Download:
    """Tensors on their way to the host, from when this is made.

    What is computed into them later does not come along, on CUDA; on a CPU nobody may change them.
    """

    __slots__ = ("_device", "_event", "_values")

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._values = list(tensors)
        if device.type == "cpu" or not tensors:
            return
        starts, size = _places([tensor.nbytes for tensor in tensors])
        staged = pinned(size)
        for place, (tensor, start) in enumerate(zip(tensors, starts, strict=True)):
            part = staged[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._values[place] = part.copy_(tensor, non_blocking=True)
        # Whoever waits sleeps, in place of spinning on a processor that others want.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    @property
    def here(self) -> bool:
        """Whether nobody needs to wait."""
        return self._event is None

    def wait(self) -> list[Array]:
        """Return the values once they are on the host. Thread: any."""
        if self._event is not None:
            # A thread that has none would take memory of the first device for itself.
            torch.cuda.set_device(self._device)
            self._event.synchronize()
        return [value.numpy() for value in self._values]


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where parts of these sizes begin in one piece of memory, and how long it is."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return starts, end


_DTYPES = {
    kind: torch.from_numpy(np.empty(0, kind)).dtype
    for kind in (np.int64, np.int32, np.uint8, np.float32, np.float64, np.bool_)
}
