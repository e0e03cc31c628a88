"""Ranks that compute one model together, and what they exchange in a forward.

Those of a group hold parts of the same tensors; those of a pipeline hold layers that follow
each other. It moves tensors; it does not know which of a model's parts stand where.

Thread: forward thread only. Every member makes the same calls in the same order, because
all carry out the same plans. How long a member may take is not bounded here: whether it
lives is watched elsewhere.
"""

import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from drumline.core.errors import ConfigError, InvariantError, PeerError

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


class Stages(Protocol):
    """Ranks whose layers follow each other: one of each stage of a pipeline."""

    @property
    def index(self) -> int:
        """Which stage this rank is of, from 0."""

    @property
    def size(self) -> int:
        """How many stages there are."""

    def received(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return what the stage before sent of the same forward; waits for it."""

    def send(self, x: Tensor) -> None:
        """Send what the next stage goes on with, and wait for nobody; `x` is kept as it is."""

    def least(self, value: int) -> int:
        """Return the smallest of every stage's `value`. Collective: every stage."""


class SingleStage:
    """The pipeline of a rank that has all layers."""

    index = 0
    size = 1

    def received(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        raise InvariantError("the first stage receives nothing")

    def send(self, x: Tensor) -> None:
        raise InvariantError("the last stage sends nothing")

    def least(self, value: int) -> int:
        return value


class Passage:
    """How what a stage computed reaches the next: `width` values of each token."""

    __slots__ = ("_dtype", "_stages", "_width", "first", "last")

    def __init__(self, stages: Stages, width: int, dtype: torch.dtype) -> None:
        self._stages = stages
        self._width = width
        self._dtype = dtype
        self.first = stages.index == 0
        """Whether forwards begin here, with tokens."""
        self.last = stages.index == stages.size - 1
        """Whether forwards end here, with what is sampled."""

    def received(self, tokens: int) -> Tensor:
        """Return what the stage before made of the next forward, `[tokens, width]`."""
        return self._stages.received((tokens, self._width), self._dtype)

    def send(self, hidden: Tensor) -> None:
        """Hand a forward on, `[tokens, width]`."""
        self._stages.send(hidden)


def share_processors(ranks: int) -> None:
    """Take this rank's share of the threads that torch would use on a machine of `ranks`."""
    if ranks > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))


# torch exports these names without their types.
Store = Any
_torch: Any = distributed


def open_store(host: str) -> Store:
    """Return a store on a free port of `host`, where groups' members meet; `port` says which."""
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
        raise PeerError(f"no store of the replica's ranks at {host}:{port}: {error}") from error


def part_of(store: Store, name: str) -> Store:
    """Return the part of a store in which the members of one of several groups meet."""
    return _torch.PrefixStore(name, store)


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


class _Links:
    """Connections among ranks by torch.distributed: gloo for host memory, NCCL for CUDA's."""

    def __init__(
        self, store: Store, index: int, size: int, who: str, host: str, device: torch.device | None
    ) -> None:
        self._who = f"{who} {index}"
        self._device = device or torch.device("cpu")
        # Members look each other up for as long as the group lives.
        self._store = store
        _check_linkable(self._device)
        try:
            if self._device.type == "cuda":
                # NCCL makes a rank's communicator on the device that is current.
                torch.cuda.set_device(self._device)
                nccl = _torch.ProcessGroupNCCL
                self.all: Any = nccl(store, index, size, nccl.Options())
            else:
                gloo = _torch.ProcessGroupGloo
                options = gloo._Options()
                options._devices = [gloo.create_device(hostname=host)]
                options._timeout = _LONGEST_WAIT
                self.all = gloo(store, index, size, options)
        except RuntimeError as error:
            raise PeerError(f"the {who}s did not meet: {error}") from error

    def done(self, work: Any) -> None:
        """Wait for an exchange. Raises LostMemberError."""
        try:
            work.wait()
        except RuntimeError as error:
            raise LostMemberError(f"{self._who} lost a peer: {error}") from error

    def least(self, value: int) -> int:
        values = torch.tensor([value], device=self._device)
        options = _torch.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MIN
        self.done(self.all.allreduce([values], options))
        return int(values[0])

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)


class LinkedGroup:
    """Ranks of one stage, which hold parts of the same tensors."""

    def __init__(
        self, store: Store, index: int, size: int, *, host: str, device: torch.device | None = None
    ) -> None:
        """Connect with every member; `host` is the address of this one that the others reach.

        Collective: every member. Raises PeerError when one does not come, ConfigError when
        nothing here links devices of this kind.
        """
        self.index = index
        self.size = size
        self._links = _Links(store, index, size, "tensor-parallel rank", host, device)

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._links.done(self._links.all.allreduce([x]))
        return x

    def joined(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._links.done(self._links.all.allgather([parts], [x.contiguous()]))
        return torch.cat(parts, -1)

    def least(self, value: int) -> int:
        return self._links.least(value)


class LinkedStages:
    """Ranks of a pipeline, one of each stage."""

    def __init__(
        self, store: Store, index: int, size: int, *, host: str, device: torch.device | None = None
    ) -> None:
        """Connect with the other stages, as `LinkedGroup` does with its members."""
        self.index = index
        self.size = size
        self._links = _Links(store, index, size, "pipeline stage", host, device)
        self._sent: deque[tuple[Any, Tensor]] = deque()
        """What may still be on its way; the transport reads it where it lies."""

    def received(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        x = self._links.empty(shape, dtype)
        self._links.done(self._links.all.recv([x], self.index - 1, 0))
        return x

    def send(self, x: Tensor) -> None:
        # No more forwards are in flight than stages and one, so that what was sent so many
        # forwards ago has been received: its end is noted here, and not waited for.
        while len(self._sent) > self.size:
            work, _ = self._sent.popleft()
            self._links.done(work)
        x = x.contiguous()
        self._sent.append((self._links.all.send([x], self.index + 1, 0), x))

    def least(self, value: int) -> int:
        return self._links.least(value)
