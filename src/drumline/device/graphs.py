"""Decodes that are recorded once and repeated: what a forward launches, launched as one thing.

A recording repeats the operations of one forward on the memory that these read and wrote. So a
batch is brought there, and is padded to the next size that was recorded, with rows that hold
nothing but the null block and that nobody reads.

It knows neither the model nor how operations are recorded; nor when a forward runs.

Thread: forward thread only.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from drumline.contract.arrays import NO_INTS, IntArray
from drumline.core.errors import InvariantError
from drumline.device.attention import AttentionBatch
from drumline.device.kv import BlockShape, BlockTable

_NOBODY = 0
"""The pool row that is never given: its blocks are the null block."""
_STEPS = ((8, 64), (16, 256), (32, None))
"""By how much sizes grow, and up to which."""


def sizes_up_to(most: int) -> tuple[int, ...]:
    """Return the sizes that are recorded for batches of up to `most` rows.

    From 24 rows on, a quarter of a padded batch is padding at most.
    """
    sizes = [size for size in (1, 2, 4, 8) if size <= most]
    for step, end in _STEPS:
        while sizes[-1] >= step and sizes[-1] + step <= min(most, end or most):
            sizes.append(sizes[-1] + step)
    return (*sizes, most) if sizes[-1] < most else tuple(sizes)


class Recorder(Protocol):
    """A way to record what a function does on a device."""

    def __call__(self, forward: Callable[[], None]) -> Callable[[], None]:
        """Return what repeats `forward`, on the memory that it reads and writes.

        It may be called several times meanwhile.
        """


class CudaRecorder:
    """Records CUDA graphs. What they need between operations lies in the same memory for all."""

    __slots__ = ("_memory", "_stream")

    def __init__(self, device: torch.device) -> None:
        # The memory of graphs that are gone is not taken up again: it is one recorder's.
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's has no types

    def __call__(self, forward: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._stream.device):
            # Libraries choose kernels, and take memory of their own, at a first call.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                forward()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may copy meanwhile, and ask what is done.
            with torch.cuda.graph(
                graph, self._memory, self._stream, capture_error_mode="thread_local"
            ):
                forward()
        replay: Callable[[], None] = graph.replay
        return replay


Forward = Callable[[Tensor, AttentionBatch], Tensor]
"""Maps what is fed, an entry a token, and where the tokens lie to what the last layer made."""


class _Recording(Struct, frozen=True, eq=False):
    """One size: the batch that its operations read, and what repeats them."""

    batch: AttentionBatch
    repeat: Callable[[], None]


class DecodeGraphs:
    """Recordings of a model's forward for batches of decodes, one for each of some sizes."""

    __slots__ = (
        "_fed",
        "_hidden",
        "_prepare",
        "_recorder",
        "_recordings",
        "_shape",
        "_table",
        "sizes",
    )

    def __init__(
        self,
        sizes: Sequence[int],
        fed: Tensor,
        hidden: Tensor,
        table: BlockTable,
        shape: BlockShape,
        prepare: Callable[[AttentionBatch], None],
        recorder: Callable[[], Recorder],
    ) -> None:
        """Record nothing yet.

        `fed` and `hidden` are memory for what the largest size is fed, and for what is made of it:
        an entry a row each. `prepare` is called before each repetition with the batch
        that its operations read: what else they read it has to write. A `recorder` is made
        for each model.
        """
        self.sizes = sorted(set(sizes))
        """Which are recorded, smallest first."""
        self._fed = fed
        self._hidden = hidden
        self._table = table
        self._shape = shape
        self._prepare = prepare
        self._recorder = recorder
        self._recordings: dict[int, _Recording] = {}

    def record(self, forward: Forward) -> None:
        """Record a forward in all sizes, which writes to the null block alone."""
        self.drop()
        recorder = self._recorder()
        self._fed.zero_()
        # The largest first: what it needs in between is enough for all others.
        for size in reversed(self.sizes):
            batch = self._padded(NO_INTS, NO_INTS, size)
            fed, hidden = self._fed[:size], self._hidden[:size]

            def once(
                fed: Tensor = fed, batch: AttentionBatch = batch, hidden: Tensor = hidden
            ) -> None:
                hidden.copy_(forward(fed, batch))

            self._prepare(batch)
            self._recordings[size] = _Recording(batch, recorder(once))

    def drop(self) -> None:
        """Give the recordings up, as what they read is going to be elsewhere."""
        self._recordings.clear()

    def holds(self, rows: int) -> bool:
        """Whether there is a recording for so many decodes."""
        return bool(self._recordings) and rows <= self.sizes[-1]

    def hidden(self, fed: Tensor, rows: IntArray, prefixes: IntArray) -> Tensor:
        """Return what a forward makes of a token of each of `rows`, at positions `prefixes`.

        It is overwritten by the next one. Raises InvariantError without a recording.
        """
        count = len(rows)
        if not self.holds(count):
            raise InvariantError(f"no forward of {count} decodes is recorded")
        size = self.sizes[bisect.bisect_left(self.sizes, count)]
        recording = self._recordings[size]
        recording.batch.take(self._padded(rows, prefixes, size))
        self._fed[:count].copy_(fed)
        # What a row was fed before may be no number, which would spread from the null block.
        self._fed[count:size].zero_()
        self._prepare(recording.batch)
        recording.repeat()
        return self._hidden[:count]

    def _padded(self, rows: IntArray, prefixes: IntArray, size: int) -> AttentionBatch:
        """Return a batch of decodes that is filled up with first tokens of nobody."""
        padding = np.zeros(size - len(rows), np.int32)
        return AttentionBatch(
            self._table,
            np.concatenate((rows, padding + _NOBODY)),
            np.ones(size, np.int32),
            np.concatenate((prefixes, padding)),
            self._shape,
            self._fed.device,
        )
