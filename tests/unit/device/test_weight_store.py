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


@pytest.fixture
def device(monkeypatch):
    """Memory that is kept as a device's is, in the host's own."""
    trimmed = []
    monkeypatch.setattr("drumline.device.weights.store.trim", trimmed.append)
    made = torch.zeros

    def zeros(*size, device=None, **how):
        return made(*size, **how)

    monkeypatch.setattr(torch, "zeros", zeros)
    return torch.device("cuda", 0)


def test_a_device_s_weights_leave_its_storage_empty_and_come_back_to_the_same_views(device):
    store = WeightStore(torch.bfloat16, device)
    weights = [store.new(shape) for shape in ((3,), (7, 5), (40 * MIB,), (1000, 1001))]
    for weight in weights:
        weight.copy_(torch.randn(weight.shape))
    kept = [weight.clone() for weight in weights]
    halves = weights[1].unbind(1)
    for _ in range(2):
        store.offload()
        assert [weight.untyped_storage().nbytes() for weight in weights] == [0] * 4
        store.restore()
        assert all(torch.equal(weight, copy) for weight, copy in zip(weights, kept, strict=True))
        assert torch.equal(halves[2], kept[1][:, 2])
    store.drop()
    assert not weights[2].untyped_storage().nbytes()
    store.restore()
    assert not any(weight.any() for weight in weights)


def test_a_device_s_pool_comes_back_blank(device):
    memory = Memory(MIB, device)
    half = memory.bytes.view(2, -1)[1]
    memory.bytes.fill_(7)
    memory.give_back()
    memory.take_back()
    assert len(half) == MIB // 2
    assert not half.any()
    half.fill_(9)
    memory.take_back()
    assert half.eq(9).all()
