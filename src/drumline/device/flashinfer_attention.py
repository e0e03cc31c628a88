"""Attention by FlashInfer, on CUDA: its kernels read pages where they lie, a whole batch a call.

What a call does is planned on the host from where tokens lie, once for all layers of one
window. Plans are copied to the device behind what is queued there, and nothing waits for that.

Rows of one token at a batch's end are decodes, and are read by a call of their own: a prompt is
computed in tiles of many tokens, of which each of them would waste one.

Thread: forward thread only.
"""

from collections import deque
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from drumline.contract.arrays import IntArray
from drumline.core.errors import InvariantError
from drumline.device.attention import AttentionBatch
from drumline.device.kv import KvPool
from drumline.device.staging import on_device, pinned

_ORDER = "NHD"
"""A page's tokens one behind the other, all heads of each: the pool's form in rows."""
_WORKSPACE_BYTES = 128 << 20
"""For sums of contexts that are read in parts: what the library recommends."""
FLOATS = (torch.float16, torch.bfloat16)
"""What the library's kernels for matrix units compute in, keys and values alike."""


class HeadShape(Struct, frozen=True):
    """This rank's heads, and what its layers read."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: frozenset[int | None]
    """Of all its layers: how many tokens back are read, own included; None reads all."""
    dtype: torch.dtype


def why_unfit(shape: HeadShape, kept: torch.dtype) -> str | None:
    """Return why the library cannot compute such heads, if so; what it compiles is tried later."""
    if shape.dtype not in FLOATS or kept != shape.dtype:
        return (
            f"computes float16 or bfloat16 from a cache of the same, not {shape.dtype} from {kept}"
        )
    if shape.heads % shape.kv_heads:
        return f"needs heads that share KV heads evenly, unlike {shape.heads} and {shape.kv_heads}"
    return None


class Pages(Struct, frozen=True, eq=False):
    """Where contexts lie, on the host, int32: each row's pages behind those of the one before.

    The last page of each has a token at least.
    """

    starts: IntArray
    """Where each row's pages begin in `numbers`, and where the last one's end: `[rows + 1]`."""
    last: IntArray
    """How many tokens the last page of each holds."""
    numbers: IntArray

    @classmethod
    def of(cls, batch: AttentionBatch, page: int) -> "Pages":
        """Return those of a batch, what it feeds included."""
        last = (batch.prefixes + batch.lengths - 1) % page + 1
        held = np.arange(batch.held.shape[1]) < batch.counts[:, None]
        return cls(_starts(batch.counts), last.astype(np.int32), batch.held[held].astype(np.int32))


def _starts(counts: IntArray) -> IntArray:
    """Return where each of several parts begins, and where the last one ends, int32."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


class _OnDevice(Struct, frozen=True, eq=False):
    """What a batch's layers read of it on the device, int32, in one piece of memory."""

    rows: Tensor
    """The row of each token."""
    positions: Tensor
    starts: Tensor
    last: Tensor
    numbers: Tensor

    @staticmethod
    def size(tokens: int, rows: int, pages: int) -> int:
        """Return how many numbers that is."""
        return 2 * tokens + 2 * rows + 1 + pages

    @classmethod
    def in_memory(cls, memory: Tensor, tokens: int, rows: int) -> "_OnDevice":
        """View memory that was filled by `_packed`; page numbers take what is left of it."""
        numbers = len(memory) - cls.size(tokens, rows, 0)
        return cls(*memory.split_with_sizes([tokens, tokens, rows + 1, rows, numbers]))


def _packed(batch: AttentionBatch, pages: Pages) -> IntArray:
    rows = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    positions = np.arange(len(rows)) - (batch.starts - batch.prefixes)[rows]
    parts = (rows, positions, pages.starts, pages.last, pages.numbers)
    return np.concatenate(parts).astype(np.int32)


class _PlanMemory:
    """Pinned memory for plans that are on their way to the device.

    The library writes each where it planned the one before. Behind forwards that are queued, that
    one may not have been copied yet, so each is lent memory of its own until it has. Where all of
    it is on its way there is more of it, and nothing waits.
    """

    __slots__ = ("_bytes", "_device", "_sent")

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = size
        self._device = device
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def plan(self, wrapper: Any, *arguments: Any, **named: Any) -> None:
        """Have a wrapper of the library plan in memory of its own."""
        memory = self._free()
        wrapper._pin_memory_int_workspace_buffer = memory
        wrapper.plan(*arguments, **named)
        copied = None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's has no types
            copied.record()
        self._sent.append((memory, copied))

    def _free(self) -> Tensor:
        if self._sent:
            memory, copied = self._sent[0]
            if copied is None or copied.query():  # type: ignore[no-untyped-call]  # nor has this
                self._sent.popleft()
                return memory
        if self._device.type != "cuda":
            return torch.empty(self._bytes, dtype=torch.uint8)
        return pinned(self._bytes)


class _Call(Struct, frozen=True, eq=False):
    """A call that was planned: which tokens it is for, and what makes it."""

    tokens: slice
    wrapper: Any


class _Planned(Struct, frozen=True, eq=False):
    """What was planned for one batch: its calls by window, added as layers ask for them."""

    batch: AttentionBatch
    pages: Pages
    device: _OnDevice
    calls: dict[int | None, list[_Call]]


class _Decodes(Struct, frozen=True, eq=False):
    """Decodes of one number whose batch stays where it is: its wrappers, by window."""

    device: _OnDevice
    wrappers: dict[int | None, Any]


class FlashInferAttention:
    """The back end of CUDA where the library is installed."""

    __slots__ = (
        "_decodes",
        "_eager",
        "_integers",
        "_library",
        "_memory",
        "_planned",
        "_plans",
        "_shape",
        "_workspace",
        "pool",
    )

    def __init__(self, library: Any, pool: KvPool, shape: HeadShape) -> None:
        if pool.form.lines or pool.form.dtype != shape.dtype:
            raise InvariantError(f"FlashInfer reads rows of {shape.dtype}, not {pool.form}")
        self.pool = pool
        self._library = library
        self._shape = shape
        # It counts on zeros before the first use.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._eager: dict[tuple[bool, int | None], Any] = {}
        self._decodes: dict[int, _Decodes] = {}
        self._integers: dict[int | None, Tensor] = {}
        self._memory = torch.empty(0, dtype=torch.int32, device=pool.device)
        self._plans: _PlanMemory | None = None
        self._planned: _Planned | None = None

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: AttentionBatch,
        window: int | None,
    ) -> Tensor:
        planned = self._planned
        if planned is None or planned.batch is not batch:
            self._planned = planned = self._taken_up(batch)
        calls = planned.calls.get(window)
        if calls is None:
            planned.calls[window] = calls = self._calls(planned, window)
        pool = self.pool.keys[layer].numbers, self.pool.values[layer].numbers
        at = planned.device
        # Before anything is read: a batch's tokens attend to each other.
        self._library.append_paged_kv_cache(
            key, value, at.rows, at.positions, pool, at.numbers, at.starts, at.last, _ORDER
        )
        out = torch.empty_like(query)
        for call in calls:
            call.wrapper.run(query[call.tokens], pool, out=out[call.tokens])
        return out

    def reserve(self, rows: int, columns: int) -> None:
        """Take memory that stays where it is, for up to `rows` decodes of `columns` pages each."""
        size = _OnDevice.size(rows, rows, rows * columns)
        self._memory = torch.zeros(size, dtype=torch.int32, device=self.pool.device)

    def prepare(self, batch: AttentionBatch) -> None:
        """Plan decodes that are about to be recorded or repeated, in all windows.

        Kernels that were recorded for as many rows read what this writes, so they do what is
        right for this batch. Raises InvariantError for more than was reserved.
        """
        size = len(batch.lengths)
        decodes = self._decodes.get(size)
        if decodes is None:
            self._decodes[size] = decodes = self._room_for(size)
        pages = Pages.of(batch, self.pool.shape.tokens)
        packed = on_device(self.pool.device, _packed(batch, pages))
        if len(packed) > len(self._memory):
            raise InvariantError(f"{size} decodes of {len(pages.numbers)} pages were not reserved")
        self._memory[: len(packed)].copy_(packed)
        numbers = decodes.device.numbers[: len(pages.numbers)]
        for window, wrapper in decodes.wrappers.items():
            self._plan(
                wrapper,
                torch.from_numpy(pages.starts),
                # Where the wrapper keeps them, so that it has nothing to copy.
                numbers,
                torch.from_numpy(pages.last),
                window=window,
            )
        calls = {
            window: [_Call(slice(None), wrapper)] for window, wrapper in decodes.wrappers.items()
        }
        self._planned = _Planned(batch, pages, decodes.device, calls)

    def _taken_up(self, batch: AttentionBatch) -> _Planned:
        pages = Pages.of(batch, self.pool.shape.tokens)
        memory = on_device(self.pool.device, _packed(batch, pages))
        tokens, rows = int(batch.lengths.sum()), len(batch.lengths)
        return _Planned(batch, pages, _OnDevice.in_memory(memory, tokens, rows), {})

    def _calls(self, planned: _Planned, window: int | None) -> list[_Call]:
        """Plan the calls of a batch's layers with such a window: of prompts, and of decodes."""
        lengths, pages = planned.batch.lengths, planned.pages
        several = np.flatnonzero(lengths > 1)
        rows = int(several[-1]) + 1 if len(several) else 0
        tokens = int(lengths[:rows].sum())
        split = int(pages.starts[rows])
        calls = []
        if rows:
            wrapper = self._wrapper(False, window)
            self._plan(
                wrapper,
                torch.from_numpy(_starts(lengths[:rows])),
                torch.from_numpy(pages.starts[: rows + 1]),
                planned.device.numbers[:split],
                torch.from_numpy(pages.last[:rows]),
                window=window,
                causal=True,
            )
            calls.append(_Call(slice(0, tokens), wrapper))
        if rows < len(lengths):
            wrapper = self._wrapper(True, window)
            self._plan(
                wrapper,
                torch.from_numpy(pages.starts[rows:] - split),
                planned.device.numbers[split:],
                torch.from_numpy(pages.last[rows:]),
                window=window,
            )
            calls.append(_Call(slice(tokens, None), wrapper))
        return calls

    def _plan(self, wrapper: Any, *where: Tensor, window: int | None, **named: Any) -> None:
        if self._plans is None:
            self._plans = _PlanMemory(len(wrapper._int_workspace_buffer), self.pool.device)
        shape = self._shape
        self._plans.plan(
            wrapper,
            *where,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            self.pool.shape.tokens,
            # It counts those before a token; ours is counted too.
            window_left=-1 if window is None else window - 1,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            **named,
        )

    def _wrapper(self, decodes: bool, window: int | None) -> Any:
        """Return what makes calls of any batch."""
        wrapper = self._eager.get((decodes, window))
        if wrapper is None:
            library = self._library
            # Heads that share a KV head fill a tile of the matrix units between them.
            wrapper = (
                library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, _ORDER, use_tensor_cores=True
                )
                if decodes
                else library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _ORDER)
            )
            self._eager[decodes, window] = wrapper
        return wrapper

    def _room_for(self, size: int) -> _Decodes:
        """Return wrappers of so many decodes.

        Those of all sizes read the same memory, and plan in the same, which is written anew for
        each use.
        """
        if _OnDevice.size(size, size, size) > len(self._memory):
            raise InvariantError(f"{size} decodes were not reserved")
        device = _OnDevice.in_memory(self._memory, size, size)
        wrappers = {}
        for window in self._shape.windows:
            wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                _ORDER,
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=device.starts,
                paged_kv_indices_buffer=device.numbers,
                paged_kv_last_page_len_buffer=device.last,
            )
            integers = self._integers.setdefault(window, wrapper._int_workspace_buffer)
            wrapper.reset_workspace_buffer(self._workspace, integers)
            wrappers[window] = wrapper
        return _Decodes(device, wrappers)
