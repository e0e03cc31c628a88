"""Weights that leave memory and come back, and memory that the system really gets."""

import itertools
import os
import sys
from pathlib import Path

import pytest
import torch

from drumline.core.errors import InvariantError
from drumline.device.memory import Memory
from drumline.device.weights.store import WeightStore

CPU = torch.device("cpu")
MIB = 1 << 20

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and gives memory back")


def resident():
    """Return the bytes of this process that are in memory and belong to no file."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")


def filled(dtype=torch.float32):
    """Return a store and weights of odd shapes in it, one larger than a piece."""
    store = WeightStore(dtype, CPU)
    generator = torch.Generator().manual_seed(3)
    weights = [store.new(shape) for shape in ((3,), (7, 5), (40 * MIB,), (1000, 1001), (1,))]
    for weight in weights:
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return store, weights


@linux
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_bit_for_bit_to_where_they_were(dtype):
    store, weights = filled(dtype)
    kept = [weight.clone() for weight in weights]
    places = [weight.data_ptr() for weight in weights]
    size = sum(weight.numel() * weight.itemsize for weight in weights)
    before = resident()
    store.offload()
    assert before - resident() > 0.95 * size
    assert not weights[2].any()
    store.restore()
    assert all(torch.equal(weight, copy) for weight, copy in zip(weights, kept, strict=True))
    assert [weight.data_ptr() for weight in weights] == places
    store.offload()
    store.restore()
    assert torch.equal(weights[3], kept[3])


@linux
def test_weights_that_are_dropped_leave_blank_memory_where_they_were():
    store, weights = filled()
    places = [weight.data_ptr() for weight in weights]
    before = resident()
    store.drop()
    assert before - resident() > 150 * MIB
    assert store.away
    store.restore()
    assert not store.away
    assert not any(weight.any() for weight in weights)
    assert [weight.data_ptr() for weight in weights] == places
    weights[1].fill_(3)
    store.offload()
    store.restore()
    assert weights[1].eq(3).all()


@linux
def test_weights_that_find_no_room_stay_where_they_are(monkeypatch):
    store, weights = filled()
    kept = weights[1].clone()

    class Full:
        closed = False

        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            self.closed = True

    full = Full()
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: full)
    with pytest.raises(OSError, match="No space left"):
        store.offload()
    assert full.closed
    assert torch.equal(weights[1], kept)
    with pytest.raises(InvariantError, match="not away"):
        store.restore()


def test_weights_do_not_overlap_and_are_aligned():
    _, weights = filled()
    spans = sorted((weight.data_ptr(), weight.numel() * weight.itemsize) for weight in weights)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))


@linux
def test_memory_that_was_given_back_is_blank_and_may_be_used_again():
    memory = Memory(20 * MIB)
    memory.bytes.fill_(7)
    before = resident()
    memory.give_back()
    assert before - resident() > 19 * MIB
    assert not memory.bytes.any()
    memory.bytes.fill_(9)
    assert int(memory.bytes[-1]) == 9
