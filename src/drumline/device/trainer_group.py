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


class TrainerGroup:
    """This rank's membership."""

    def __init__(
        self, group: WeightGroup, timeout_s: float, clock: Clock, device: torch.device
    ) -> None:
        """Meet the others; over NCCL those who do not come are missed at the first tensor.

        `device` is where this rank's weights lie, for which `why_unfit` had nothing to say.
        Collective: every member. Raises PeerError when they did not all come.
        """
        timeout = timedelta(seconds=timeout_s)
        self._timeout_s = timeout_s
        self._clock = clock
        self.device = device if group.backend == NCCL else torch.device("cpu")
        """Where a tensor has to lie that is received."""
        try:
            _await_listener(group.address, group.port, timeout_s, clock)
            place = tcp(group.address, group.port)
            store, _, _ = next(_torch.rendezvous(place, group.rank, group.size, timeout=timeout))
            # Of several groups that share a store, as trainers nest them.
            for prefix in (group.name, f"{group.name}/", f"{self.device.type}/"):
                store = _torch.PrefixStore(prefix, store)
            if group.backend == NCCL:
                torch.cuda.set_device(self.device)
                nccl = _torch.ProcessGroupNCCL
                options = nccl.Options()
                options._timeout = timeout
                self._links: Any = nccl(store, group.rank, group.size, options)
                return
            gloo = _torch.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timeout
            # Of several networks, the one over which the trainer is reached.
            own = _address_towards(group.address, group.port)
            options._devices = [gloo.create_device(hostname=own)]
            self._links = gloo(store, group.rank, group.size, options)
        except (RuntimeError, ValueError, OSError) as error:
            raise PeerError(
                f"group {group.name} did not meet at {group.address}:{group.port} within "
                f"{timeout_s:g} s: {_gist(error)}"
            ) from error

    def receive(self, tensor: Tensor) -> None:
        """Fill a tensor on `device` with what the sender has. Collective: every member.

        Raises PeerError when the sender is gone or does not send it in time; the group is of
        no use then.
        """
        options = _torch.BroadcastOptions()
        options.rootRank, options.rootTensor = _SENDER, 0
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


def _await_listener(address: str, port: int, timeout_s: float, clock: Clock) -> None:
    """Wait until somebody listens. Raises OSError when nobody does in time.

    The store's own wait for that lasts twice as long as it is told, and fills the log.
    """
    end_us = clock.now_us() + int(timeout_s * 1e6)
    while True:
        try:
            left_s = (end_us - clock.now_us()) / 1e6
            socket.create_connection((address, port), timeout=max(left_s, _LOOKS_S)).close()
        except ConnectionRefusedError:
            if clock.now_us() > end_us:
                raise
            time.sleep(_LOOKS_S)
        else:
            return


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
