"""A process group of its own in which a trainer, outside the engine, sends weights.

The group is torch.distributed's, under the keys that trainers of other engines use, so that
one group of a trainer fits here too. The sender is its rank 0. It does not know what the
tensors are for.

Thread: forward thread only. No wait is longer than the bound that whoever makes one gives.
"""

import socket
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from drumline.contract.ports import Clock
from drumline.contract.weights import WeightGroup
from drumline.core.config import tcp
from drumline.core.errors import PeerError

# torch exports these names without their types.
_torch: Any = distributed

NCCL = "nccl"
_SENDER = 0
_LOOKS_S = 0.1
_POLLS_S = 0.001


class Meeting:
    """Where and when a group's members come together: from now on, for a bounded time."""

    def __init__(self, group: WeightGroup, timeout_s: float, clock: Clock) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self.clock = clock
        self._end_us = clock.now_us() + int(timeout_s * 1e6)

    @property
    def left_s(self) -> float:
        """How long is left; never nothing, as to wait for no time means to wait for ever."""
        return max((self._end_us - self.clock.now_us()) / 1e6, _LOOKS_S)

    def await_listener(self) -> None:
        """Wait until somebody listens at the place. Raises PeerError when nobody does in time.

        The store's own wait for that lasts twice as long as it is told, and fills the log.
        """
        while True:
            try:
                place = self.group.address, self.group.port
                socket.create_connection(place, timeout=self.left_s).close()
            except ConnectionRefusedError as error:
                if self.clock.now_us() > self._end_us:
                    raise self.missed(error) from error
                time.sleep(_LOOKS_S)
            except OSError as error:
                raise self.missed(error) from error
            else:
                return

    def missed(self, error: Exception) -> PeerError:
        """Return what to raise where the members did not come together."""
        group = self.group
        return PeerError(
            f"group {group.name} did not meet at {group.address}:{group.port} within "
            f"{self.timeout_s:g} s: {_gist(error)}"
        )


class TrainerGroup:
    """This rank's membership."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        """Meet the others; over NCCL those who do not come are missed at the first tensor.

        `device` is where this rank's weights lie, for which `why_unfit` had nothing to say.
        Collective: every member. Raises PeerError when they did not all come.
        """
        group = meeting.group
        self._timeout_s = meeting.timeout_s
        self._clock = meeting.clock
        self.device = device if group.backend == NCCL else torch.device("cpu")
        """Where a tensor has to lie that is received."""
        meeting.await_listener()
        left = timedelta(seconds=meeting.left_s)
        try:
            place = tcp(group.address, group.port)
            store, _, _ = next(_torch.rendezvous(place, group.rank, group.size, timeout=left))
            # Of several groups that share a store, as trainers nest them.
            for prefix in (group.name, f"{group.name}/", f"{self.device.type}/"):
                store = _torch.PrefixStore(prefix, store)
            if group.backend == NCCL:
                torch.cuda.set_device(self.device)
                nccl = _torch.ProcessGroupNCCL
                options = nccl.Options()
                options._timeout = timedelta(seconds=self._timeout_s)
                self._links: Any = nccl(store, group.rank, group.size, options)
                return
            gloo = _torch.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timedelta(seconds=meeting.left_s)
            # Of several networks, the one over which the trainer is reached.
            own = _address_towards(group.address, group.port)
            options._devices = [gloo.create_device(hostname=own)]
            self._links = gloo(store, group.rank, group.size, options)
        except (RuntimeError, ValueError, OSError) as error:
            raise meeting.missed(error) from error

    def receive(self, tensor: Tensor) -> None:
        """Fill a tensor on `device` with what the sender has. Collective: every member.

        Raises PeerError when the sender is gone or does not send it in time; the group is of
        no use then.
        """
        options = _torch.BroadcastOptions()
        options.rootRank, options.rootTensor = _SENDER, 0
        options.timeout = timedelta(seconds=self._timeout_s)
        try:
            work = self._links.broadcast([tensor], options)
            if self.device.type != "cpu":
                self._await(work)
            work.wait()
        except RuntimeError as error:
            raise PeerError(_gist(error)) from error

    def _await(self, work: Any) -> None:
        """Wait until a device has done what it was given: there, to wait only orders its work."""
        end_us = self._clock.now_us() + int(self._timeout_s * 1e6)
        while not work.is_completed():
            if self._clock.now_us() > end_us:
                self._links.abort()
                raise PeerError(f"nothing came for {self._timeout_s:g} s")
            time.sleep(_POLLS_S)


def why_unfit(backend: str, device: torch.device) -> str | None:
    """Return why a group over `backend` is not for weights on `device`, if so."""
    match backend, device.type:
        case ("gloo", _):
            return None
        case (_, "cuda") if backend == NCCL:
            if distributed.is_nccl_available():
                return None
            return "backend nccl is not in this torch, which was built without; use gloo"
        case _ if backend == NCCL:
            return "backend nccl is not for weights in host memory, where these lie; use gloo"
    return f"there is no backend {backend} here; there are gloo, and nccl for weights on CUDA"


def _address_towards(address: str, port: int) -> str:
    """Return this machine's address on the way to another. Raises OSError without a way."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    # To connect sends nothing yet: it picks a route.
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        own: str = probe.getsockname()[0]
    return own


def _gist(error: Exception) -> str:
    """Return what an error says, without the place in torch's sources, advice and the stack."""
    return str(error).split("\n", 1)[0].rpartition("] ")[2].split(". ", 1)[0]
