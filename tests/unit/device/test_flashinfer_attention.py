"""FlashInfer is told of batches what makes it read what the reference reads.

The library needs a GPU to compute. Here it is one in plain PyTorch that does what its
documentation says; the last test holds the calls against the library itself, where it is installed.
"""

import importlib.util
import inspect
import sys
import types

import numpy as np
import pytest
import torch

from drumline.core.errors import InvariantError
from drumline.device import flashinfer_attention
from drumline.device.attention import AttentionBatch, TorchAttention
from drumline.device.flashinfer_attention import (
    FlashInferAttention,
    HeadShape,
    _PlanMemory,
    why_unfit,
)
from drumline.device.flashinfer_trial import find_flashinfer, tried
from drumline.device.kv import BlockTable, KvPool
from drumline.device.kv_form import KvForm

from .conftest import ints
from .paged_library import PagedLibrary
from .test_native_attention import part, sequence

PAGE, COLUMNS, ROWS = 16, 24, 5
SHAPES = [(9, 3, 64), (4, 4, 16), (8, 1, 32)]
LAYERS = 2
CPU = torch.device("cpu")


class Side:
    """A back end with a pool of its own, and a table of shuffled blocks."""

    def __init__(self, shape, windows=(), library=None):
        _, kv_heads, dim = shape
        pool = KvPool(
            layers=LAYERS,
            blocks=ROWS * COLUMNS + 1,
            block_tokens=PAGE,
            kv_heads=kv_heads,
            head_dim=dim,
            form=KvForm(torch.bfloat16),
            device=CPU,
        )
        if library is None:
            self.attention = TorchAttention(pool)
        else:
            told = HeadShape(*shape, frozenset(windows), torch.bfloat16)
            self.attention = FlashInferAttention(library, pool, told)
            self.attention.reserve(4, COLUMNS)
        self.table = BlockTable(ROWS + 1, COLUMNS)
        blocks = np.random.default_rng(2).permutation(np.arange(1, ROWS * COLUMNS + 1))
        for row in range(1, ROWS + 1):
            mine = blocks[(row - 1) * COLUMNS : row * COLUMNS].astype(np.int32)
            self.table.patch(np.full(COLUMNS, row, np.int32), np.arange(COLUMNS), mine)

    def batch(self, rows, prefixes, lengths):
        return AttentionBatch(
            self.table, ints(*rows), ints(*lengths), ints(*prefixes), self.attention.pool.shape
        )

    def attend(self, rows, prefixes, parts, windows):
        """Feed each row's part to a layer of each of `windows`; returns what was read."""
        batch = self.batch(rows, prefixes, [len(part[0]) for part in parts])
        return self.layers(batch, parts, windows)

    def layers(self, batch, parts, windows):
        joined = [torch.cat(side).bfloat16() for side in zip(*parts, strict=True)]
        return [
            self.attention(layer, *joined, batch, window) for layer, window in enumerate(windows)
        ]

    def memory(self):
        return self.attention.pool.bytes


def assert_same(made, expected):
    for mine, other in zip(made, expected, strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=0, atol=2e-2)


BATCHES = [
    # Prompts alone; chunks, a chunk of one token, and decodes; decodes alone.
    ([1, 2, 3, 4], [0, 0, 0, 0], [1, 33, 70, 16]),
    ([3, 5, 1, 2, 4], [70, 0, 1, 33, 16], [20, 1, 3, 1, 1]),
    ([2, 4, 5], [34, 17, 1], [1, 1, 1]),
]


@pytest.mark.parametrize("windows", [(None, None), (20, 20), (None, 7)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batches_of_all_kinds_read_what_the_reference_reads(shape, windows):
    ours, theirs = Side(shape, windows, PagedLibrary()), Side(shape)
    for seed, (rows, prefixes, lengths) in enumerate(BATCHES):
        parts = [
            part(sequence(length, *shape, 10 * seed + row), 0, length)
            for row, length in zip(rows, lengths, strict=True)
        ]
        made, expected = (side.attend(rows, prefixes, parts, windows) for side in (ours, theirs))
        assert_same(made, expected)
        assert torch.equal(ours.memory(), theirs.memory())


def test_a_forward_is_planned_once_for_all_layers_of_a_window():
    shape = SHAPES[0]
    library = PagedLibrary()
    side = Side(shape, (None, 7), library)
    batch = side.batch([1, 2, 3], [0, 5, 9], [4, 1, 1])
    parts = [sequence(length, *shape, length) for length in (4, 1, 1)]
    for _ in range(3):
        side.layers(batch, parts, (None, 7))
    # Of prompts and decodes by themselves, in both windows.
    assert library.plans == [(-1, 1), (-1, 2), (6, 1), (6, 2)]
    side.layers(side.batch([1, 2, 3], [4, 6, 10], [1, 1, 1]), [parts[1]] * 3, (None, 7))
    assert library.plans[4:] == [(-1, 3), (6, 3)]


@pytest.mark.parametrize("windows", [(None, None), (None, 7)], ids=str)
def test_what_was_recorded_reads_the_batch_it_is_prepared_for(windows):
    shape = SHAPES[0]
    library = PagedLibrary()
    ours, theirs = Side(shape, windows, library), Side(shape)
    prompts = [sequence(length, *shape, length) for length in (33, 70, 16)]
    for side in (ours, theirs):
        side.attend([1, 2, 3], [0, 0, 0], prompts, windows)

    held = {size: ours.batch([0] * size, [0] * size, [1] * size) for size in (4, 2)}
    for batch in held.values():
        ours.attention.prepare(batch)
    made = len([call for call in library.calls if call[1] == "__init__"])
    ends = {1: 33, 2: 70, 3: 16}
    for rows in ([3], [1, 2, 3], [2, 1], [1, 2, 3], [3, 2]):
        size = 2 if len(rows) <= 2 else 4
        padding = [0] * (size - len(rows))
        prefixes = [ends[row] for row in rows]
        parts = [sequence(1, *shape, 100 * ends[row] + row) for row in rows]
        nothing = [torch.zeros_like(each) for each in parts[0]]
        held[size].take(ours.batch(rows + padding, prefixes + padding, [1] * size))
        ours.attention.prepare(held[size])
        got = ours.layers(held[size], parts + [nothing] * len(padding), windows)
        expected = theirs.attend(rows, prefixes, parts, windows)
        assert_same([each[: len(rows)] for each in got], expected)
        assert torch.equal(ours.memory()[1:], theirs.memory()[1:])
        for row in rows:
            ends[row] += 1
    # Those of one size are made once, and all plan in the same memory of the device.
    assert len([call for call in library.calls if call[1] == "__init__"]) == made
    recorded = list(ours.attention._decodes.values())
    for window in windows:
        first, second = (each.wrappers[window]._int_workspace_buffer for each in recorded)
        assert first is second


def test_more_decodes_than_were_reserved_are_refused():
    side = Side(SHAPES[0], (None,), PagedLibrary())
    side.attention.reserve(2, 3)
    side.attention.prepare(side.batch([0, 1], [0, 70], [1, 1]))
    with pytest.raises(InvariantError, match="2 decodes of 8 pages were not reserved"):
        side.attention.prepare(side.batch([1, 2], [70, 40], [1, 1]))
    with pytest.raises(InvariantError, match="9 decodes were not reserved"):
        side.attention.prepare(side.batch([0] * 9, [0] * 9, [1] * 9))


class Copying:
    """In place of a CUDA event: passed once it is told so."""

    def __init__(self):
        self.passed = False

    def record(self):
        pass

    def query(self):
        return self.passed


class Planning:
    """In place of a wrapper: notes in which memory it planned."""

    def __init__(self):
        self.used = []

    def plan(self, _):
        self.used.append(self._pin_memory_int_workspace_buffer.data_ptr())


def test_a_plan_on_its_way_is_not_written_over(monkeypatch):
    copies = []

    def event():
        copies.append(Copying())
        return copies[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(flashinfer_attention, "pinned", torch.zeros)
    plans, wrapper = _PlanMemory(8, torch.device("cuda")), Planning()
    plans.plan(wrapper, 1)
    plans.plan(wrapper, 2)
    assert len(set(wrapper.used)) == 2
    copies[0].passed = True
    plans.plan(wrapper, 3)
    assert wrapper.used[2] == wrapper.used[0]
    plans.plan(wrapper, 4)
    assert len(set(wrapper.used)) == 3
    for copy in copies:
        copy.passed = True
    for number in range(20):
        plans.plan(wrapper, number)
        copies[-1].passed = True
    assert len(set(wrapper.used)) == 3


def shape_of(heads, kv_heads, dtype=torch.bfloat16, windows=(None,)):
    return HeadShape(heads, kv_heads, 64, frozenset(windows), dtype)


def test_what_the_library_does_not_compute_is_known_before():
    half, full = torch.bfloat16, torch.float32
    assert why_unfit(shape_of(9, 3), half) is None
    assert why_unfit(shape_of(9, 3, torch.float16), torch.float16) is None
    assert "from torch.int8" in why_unfit(shape_of(9, 3), torch.int8)
    assert "not torch.float32" in why_unfit(shape_of(9, 3, full), full)
    assert "unlike 5 and 3" in why_unfit(shape_of(5, 3), half)


def test_a_library_that_does_what_it_says_passes_its_trial():
    library = PagedLibrary()
    assert tried(library, shape_of(4, 2, windows=(None, 9)), PAGE, CPU) is None
    planned = {call[0] for call in library.calls if call[1] == "plan"}
    assert planned == {"BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"}


@pytest.mark.parametrize("wrong", ["a window", "a prompt", "a recording"])
def test_a_library_that_reads_other_values_fails_its_trial(wrong, monkeypatch):
    library = PagedLibrary()
    owner = {
        "a window": library.BatchDecodeWithPagedKVCacheWrapper,
        "a prompt": library.BatchPrefillWithPagedKVCacheWrapper,
        "a recording": library.BatchDecodeWithPagedKVCacheWrapper,
    }[wrong]
    run = owner.run

    def other(self, query, pool, *, out):
        if wrong == "a window":
            self.window_left = -1
        run(self, query, pool, out=out)
        if wrong == "a prompt" or (wrong == "a recording" and self.recorded):
            out[-1] += 1

    monkeypatch.setattr(owner, "run", other)
    told = tried(library, shape_of(4, 2, windows=(None, 9)), PAGE, CPU)
    assert told.startswith("reads other values than PyTorch")


def test_what_keeps_a_library_from_its_trial_is_told(monkeypatch):
    none = find_flashinfer(shape_of(4, 2), PAGE, torch.bfloat16, CPU)
    if importlib.util.find_spec("flashinfer") is None:
        assert none.why_none.startswith("is not installed: pip install")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    unfit = find_flashinfer(shape_of(4, 2), PAGE, torch.int8, CPU)
    assert unfit.why_none.startswith("computes float16 or bfloat16")
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(__version__="9"))
    broken = find_flashinfer(shape_of(4, 2), PAGE, torch.bfloat16, CPU)
    assert broken.why_none.startswith("failed its trial: ")
    library = PagedLibrary()
    library.__version__ = "9"
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    found = find_flashinfer(shape_of(4, 2), PAGE, torch.bfloat16, CPU)
    assert (found.library, found.name) == (library, "FlashInfer 9")


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None,
    reason="flashinfer is not installed: pip install --no-deps flashinfer-python",
)
def test_the_calls_are_the_librarys_own():
    library = pytest.importorskip("flashinfer")
    told = PagedLibrary()
    shape = SHAPES[0]
    side = Side(shape, (None, 7), told)
    parts = [sequence(length, *shape, length) for length in (4, 1, 1)]
    side.attend([1, 2, 3], [0, 5, 9], parts, (None, 7))
    side.attention.prepare(side.batch([0, 0], [0, 0], [1, 1]))
    assert {name for _, name, _, _ in told.calls} == {
        "__init__",
        "plan",
        "run",
        "append_paged_kv_cache",
        "reset_workspace_buffer",
    }
    for owner, name, arguments, named in told.calls:
        of = library if owner is None else getattr(library, owner)
        bound = arguments if owner is None else (None, *arguments)
        inspect.signature(getattr(of, name)).bind(*bound, **named)
        if (owner, name) == ("BatchDecodeWithPagedKVCacheWrapper", "plan"):
            # What `plan` takes is named by what it hands on to.
            inspect.signature(of._plan_impl).bind(*bound, **named)
    names = inspect.getsource(library.BatchDecodeWithPagedKVCacheWrapper.__init__)
    assert "self._int_workspace_buffer" in names
    assert "self._pin_memory_int_workspace_buffer" in names
