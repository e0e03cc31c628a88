"""The group of ranks that compute one model together, and what they exchange in a forward.

It moves tensors; it does not know which of a model's parts stand where.

Thread: forward thread only. Every member makes the same calls in the same order, because
all carry out the same plans. How long a member may take is not bounded here: whether it
lives is watched elsewhere.
"""

import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from drumline.core.errors import ConfigError, PeerError

_MEETING = timedelta(seconds=60)
_LONGEST_WAIT = timedelta(days=7)


class LostMemberError(PeerError):
    """A member is gone. The library does not say which."""


class TensorGroup(Protocol):
    """Ranks that hold parts of the same tensors."""

    @property
    def index(self) -> int:
        """This rank's place, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's `x`, the same bits on each. `x` may be overwritten.

        Collective: every member.
        """

    def joined(self, x: Tensor) -> Tensor:
        """Return every rank's `x` side by side along the last dimension; all of one shape.

        Collective: every member.
        """

    def least(self, value: int) -> int:
        """Return the smallest of every rank's `value`. Collective: every member."""


class Alone:
    """The group of a rank that has the whole model."""

    index = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def joined(self, x: Tensor) -> Tensor:
        return x

    def least(self, value: int) -> int:
        return value


def share_processors(ranks: int) -> None:
    """Take this rank's share of the threads that torch would use on a machine of `ranks`."""
    if ranks > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))


# torch exports these names without their types.
Store = Any
_torch: Any = distributed


def open_store(host: str) -> Store:
    """Return a store on a free port of `host`, where a group's members meet; `port` says which."""
    # Left to itself, it would listen on every address of the machine.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    return _torch.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=_MEETING,
        master_listen_fd=listener.detach(),
    )


def dial_store(host: str, port: int) -> Store:
    """Return the store that another member opened. Raises PeerError when it cannot be reached."""
    try:
        return _torch.TCPStore(host, port, is_master=False, timeout=_MEETING)
    except RuntimeError as error:
        raise PeerError(f"no store of tensor-parallel ranks at {host}:{port}: {error}") from error


def _check_linkable(device: torch.device) -> None:
    """Raise ConfigError unless this torch can link ranks on devices of this kind."""
    match device.type:
        case "cpu":
            return
        case "cuda" if distributed.is_nccl_available():
            return
        case "cuda":
            needs = "NCCL, which this torch was built without; install torch for CUDA"
        case kind:
            needs = f"a library for {kind}; there is gloo for cpu, and NCCL for cuda"
    raise ConfigError("--tensor-parallel-size", f"ranks on {device} exchange tensors over {needs}")


class LinkedGroup:
    """Ranks connected by torch.distributed: over gloo for host memory, over NCCL for CUDA's."""

    def __init__(
        self, store: Store, index: int, size: int, *, host: str, device: torch.device | None = None
    ) -> None:
        """Connect with every member; `host` is the address of this one that the others reach.

        Collective: every member. Raises PeerError when one does not come, ConfigError when
        nothing here links devices of this kind.
        """
        self.index = index
        self.size = size
        self._device = device or torch.device("cpu")
        # Members look each other up for as long as the group lives.
        self._store = store
        _check_linkable(self._device)
        try:
            if self._device.type == "cuda":
                # NCCL makes a rank's communicator on the device that is current.
                torch.cuda.set_device(self._device)
                nccl = _torch.ProcessGroupNCCL
                self._links: Any = nccl(store, index, size, nccl.Options())
            else:
                gloo = _torch.ProcessGroupGloo
                options = gloo._Options()
                options._devices = [gloo.create_device(hostname=host)]
                options._timeout = _LONGEST_WAIT
                self._links = gloo(store, index, size, options)
        except RuntimeError as error:
            raise PeerError(f"the tensor-parallel ranks did not meet: {error}") from error

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._done(self._links.allreduce([x]))
        return x

    def joined(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._done(self._links.allgather([parts], [x.contiguous()]))
        return torch.cat(parts, -1)

    def least(self, value: int) -> int:
        values = torch.tensor([value], device=self._device)
        options = _torch.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MIN
        self._done(self._links.allreduce([values], options))
        return int(values[0])

    def _done(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise LostMemberError(
                f"tensor-parallel rank {self.index} lost a peer: {error}"
            ) from error
