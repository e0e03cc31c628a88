"""The control plane's door to the device: operations in, host values out.

It turns each operation into a task of the forward thread and holds no tensor.
"""

import gc
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from drumline.contract.cache import CacheAck, WriteBack
from drumline.contract.grammar import Attachment
from drumline.contract.plan import Plan
from drumline.contract.ports import Dispatch, DpRound
from drumline.contract.profile import Recording, Span, Stage
from drumline.contract.regions import Region
from drumline.contract.request import Admission
from drumline.contract.result import ForwardResult
from drumline.contract.weights import NewWeights, WeightGroup, WeightRows
from drumline.core.errors import InvariantError
from drumline.device.forward_thread import Answer, ForwardThread
from drumline.device.handle import DeviceHandle

FULL_COLLECTION_FORWARDS = 4096
"""Forwards between two full collections of garbage. It counts what all ranks do alike, so that
they collect in one round: each would stall all the others otherwise."""


class QueuedDataPlane:
    """Implements `contract.ports.DataPlane` on a device handle and a forward thread.

    Thread: control thread.
    """

    __slots__ = ("_forwards", "_handle", "_open", "_thread", "_tickets")

    def __init__(self, handle: DeviceHandle, thread: ForwardThread) -> None:
        self._handle = handle
        self._thread = thread
        self._forwards = 0
        self._tickets = 0
        self._open: OrderedDict[int, Answer[ForwardResult | None]] = OrderedDict()

    def admit(self, requests: Sequence[Admission]) -> None:
        """Queue: learn requests, before a plan names them."""
        self._thread.submit(partial(self._handle.admit, tuple(requests)))

    def attach_grammars(self, attachments: Sequence[Attachment]) -> None:
        """Queue: hold admitted requests to grammars, before a plan names them."""
        self._thread.submit(partial(self._handle.attach_grammars, tuple(attachments)))

    def execute(self, plan: Plan, dispatch: Dispatch) -> int | None:
        """Queue: carry out a plan; returns the ticket of its forward, or None without a batch."""
        answer = self._thread.submit(partial(self._handle.execute, plan, dispatch))
        if any(isinstance(op, WriteBack) and op.pinned for op in plan.cache_ops):
            # Behind the forward, which may write what they read; its tokens wait for no copy.
            self._thread.submit(partial(self._handle.store_pinned, plan.cache_ops))
        if plan.batch is None or not plan.batch.size:
            if dispatch.dp is not None and dispatch.dp.idle:
                self._forwarded()
            return None
        self._forwarded()
        self._tickets += 1
        self._open[self._tickets] = answer
        return self._tickets

    def idle_forward(self, dp: DpRound) -> None:
        """Run an idle forward in a frozen round, and wait for it."""
        self._thread.submit(partial(self._handle.idle_forward, dp)).wait()
        self._forwarded()

    def complete(self, ticket: int) -> ForwardResult:
        """Wait for a forward's results. Tickets are completed in order, each once."""
        if not self._open or next(iter(self._open)) != ticket:
            raise InvariantError(f"ticket {ticket} is not the next one open: {list(self._open)}")
        result = self._open.pop(ticket).wait()
        if result is None:
            raise InvariantError(f"the forward of ticket {ticket} returned nothing")
        return result

    def poll_cache_acks(self) -> list[CacheAck]:
        """Return the ends of cache operations that landed since the last call; each once."""
        self._thread.check()
        return self._handle.poll_cache_acks()

    def release(self, rids: Sequence[str]) -> None:
        """Queue: forget ended requests, behind the forwards that read what they hold."""
        self._thread.submit(partial(self._handle.release, tuple(rids)))

    def release_memory(self, regions: Sequence[Region]) -> str | None:
        """Give regions of memory back, and wait; returns why it cannot."""
        return self._thread.call(partial(self._handle.release_memory, tuple(regions)))

    def drop_weights(self) -> None:
        """Give the weights' memory back and keep nothing of them, and wait."""
        self._thread.finish(self._handle.weights.drop)

    def absent_weight(self) -> str | None:
        """Return a weight that was not loaded since all were dropped, behind all that is queued."""
        return self._thread.call(self._handle.weights.absent)

    def restore_memory(self, regions: Sequence[Region]) -> None:
        """Take regions back, and wait."""
        self._thread.finish(partial(self._handle.restore_memory, tuple(regions)))

    def open_profile(self, recording: Recording) -> str | None:
        """Make sure that this can be recorded and written, and wait; returns why it cannot."""
        return self._thread.call(partial(self._handle.open_profile, recording))

    def start_profile(self, stage: Stage | None) -> None:
        """Queue: record what follows."""
        self._thread.submit(partial(self._handle.start_profile, stage))

    def stop_profile(self, spans: tuple[Span, ...]) -> str | None:
        """Record no more, write the file, and wait; returns why it could not be written."""
        return self._thread.call(partial(self._handle.stop_profile, spans))

    def open_weights(self, source: NewWeights) -> str | None:
        """Make sure that other weights can be loaded, and wait; returns why they cannot."""
        return self._thread.call(partial(self._handle.weights.open, source))

    def load_weights(self) -> str | None:
        """Load what was opened, and wait; returns why it cannot be."""
        return self._thread.call(self._handle.weights.load)

    def settle_weights(self, taken: bool) -> None:
        """Serve what was loaded, or let it go, and wait."""
        self._thread.finish(partial(self._handle.weights.settle, taken))

    def open_weight_group(self, group: WeightGroup) -> str | None:
        """Make sure that a trainer's group can be joined, and wait; returns why it cannot."""
        return self._thread.call(partial(self._handle.weights.open_group, group))

    def join_weight_group(self) -> str | None:
        """Become a member of the group that was opened, and wait; returns why not."""
        return self._thread.call(self._handle.weights.join)

    def leave_weight_group(self, name: str) -> None:
        """Be no member of a group any more, and wait."""
        self._thread.finish(partial(self._handle.weights.leave, name))

    def read_weight(self, name: str, rows: int) -> WeightRows | str | None:
        """Return this rank's part of a weight's first rows, behind all that is queued."""
        return self._thread.call(partial(self._handle.weights.rows, name, rows))

    def _forwarded(self) -> None:
        """Count a forward, idle ones among them; behind some of them garbage is collected."""
        self._forwards += 1
        if self._forwards % FULL_COLLECTION_FORWARDS == 0:
            self._thread.submit(gc.collect)

    def shutdown(self) -> None:
        """Let what is queued run, then end the forward thread."""
        self._thread.stop()
        self._handle.stop()
