"""A trainer of a test: rank 0 of a group that an engine's ranks join, on a thread of its own."""

import socket
import threading
from datetime import timedelta

from torch import distributed


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Trainer:
    """It meets `size` - 1 others, then sends tensors, then leaves or stays until `close`."""

    def __init__(
        self,
        tensors,
        *,
        size=2,
        name="weight_update_group",
        leaves=False,
        waits_s=10,
        backend="gloo",
    ):
        self.port = free_port()
        self._backend = backend
        self.fault = None
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(tensors, size, name, leaves, waits_s)
        )
        self._thread.start()

    def _run(self, tensors, size, name, leaves, waits_s):
        try:
            group = self._met(size, name, timedelta(seconds=waits_s))
        except RuntimeError as error:
            self.fault = error
            return
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for tensor in tensors:
            group.broadcast([tensor], options).wait()
        if not leaves:
            self._end.wait(20)
        del group

    def _met(self, size, name, timeout):
        place = f"tcp://127.0.0.1:{self.port}"
        store, _, _ = next(distributed.rendezvous(place, 0, size, timeout=timeout))
        nccl = self._backend == "nccl"
        for prefix in (name, f"{name}/", "cuda/" if nccl else "cpu/"):
            store = distributed.PrefixStore(prefix, store)
        if nccl:
            return distributed.ProcessGroupNCCL(store, 0, size)
        return distributed.ProcessGroupGloo(store, 0, size, timeout)

    def close(self):
        self._end.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
