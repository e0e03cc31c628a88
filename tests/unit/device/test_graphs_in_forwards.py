"""Forwards that are repeated: which ones, and what becomes of them when memory or weights move."""

import importlib.util
import sys

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from drumline.contract.regions import Region
from drumline.contract.weights import DiskWeights
from drumline.core.config import DeviceChecks, GraphConfig, WeightUpdatePolicy
from drumline.core.errors import ConfigError
from drumline.device import backends, flashinfer_attention
from drumline.device.executor import Executor
from drumline.device.forward_thread import ForwardThread
from drumline.device.graphs import DecodeGraphs
from drumline.device.guards import ForwardChecks
from drumline.device.kernels.native import Found

from .conftest import Rig, small_config
from .emulated_cuda import DEVICE, emulated, load_guard
from .paged_library import PagedLibrary
from .test_on_cuda import close, played

PROMPTS = [np.random.default_rng(row).integers(0, 320, 9 * row).tolist() for row in range(1, 4)]
SIZES = (1, 2, 4, 8)


class Counting:
    """A recorder that counts what was recorded and repeated."""

    def __init__(self):
        self.recorded = self.repeated = 0

    def __call__(self):
        return self.record

    def record(self, forward):
        self.recorded += 1
        forward()

        def repeat():
            self.repeated += 1
            forward()

        return repeat


def with_graphs(device, counting):
    """Have a device on a CPU repeat decodes."""
    executor, table = device.built.handle._executor, device.built.handle._table
    pool = executor._attention.pool
    executor._graphs = DecodeGraphs(
        SIZES,
        torch.zeros(SIZES[-1], dtype=torch.int64),
        torch.zeros(SIZES[-1], 64),
        table,
        pool.shape,
        lambda batch: None,
        counting,
    )
    device.thread.call(executor.record)
    return executor


@pytest.fixture
def counting():
    return Counting()


@pytest.fixture
def plain(rig, monkeypatch):
    """Return a function: family to a device whose every forward is PyTorch's."""
    monkeypatch.setattr(backends, "find_kernels", lambda _: Found(None, "none are wanted"))
    return rig


def prefill(device):
    """Start a request for each prompt."""
    for row, prompt in enumerate(PROMPTS, 1):
        parts = device.start(row, f"r{row}", prompt)
        device.run(device.plan([(row, len(prompt))], **parts))


def decoded(device, count):
    """Return the tokens of so many steps of all rows."""
    return [device.run(device.plan(decodes=[1, 2, 3])).tokens.tolist() for _ in range(count)]


def test_decodes_are_repeated_and_all_else_is_not(plain, counting):
    repeated, eager = plain("llama"), plain("llama")
    with_graphs(repeated, counting)
    assert (counting.recorded, counting.repeated) == (len(SIZES), 0)
    for device in (repeated, eager):
        prefill(device)
    assert not counting.repeated
    assert decoded(repeated, 5) == decoded(eager, 5)
    assert counting.repeated == 5
    mixed = [
        device.run(device.plan([(4, 5)], [1, 2, 3], **device.start(4, "r4", PROMPTS[1]))).tokens
        for device in (repeated, eager)
    ]
    assert mixed[0].tolist() == mixed[1].tolist()
    assert counting.repeated == 5


class Waits:
    """A fence that notes for which layers it was waited."""

    def __init__(self):
        self.layers = []

    def wait(self, layer):
        self.layers.append(layer)


def test_decodes_that_wait_for_layers_of_a_load_are_not_repeated(plain, counting):
    device = plain("llama")
    executor = with_graphs(device, counting)
    prefill(device)
    fence, table = Waits(), device.built.handle._table
    batch = device.plan(decodes=[1, 2, 3]).batch
    with torch.inference_mode():
        device.thread.call(lambda: executor.run(batch, table, None, None, fence))
    assert fence.layers == [0, 1, 2]
    assert not counting.repeated


def test_what_a_stage_sends_is_not_written_over_by_the_next_forward(plain, counting):
    device = plain("llama")
    executor = with_graphs(device, counting)
    prefill(device)
    sent = []
    executor._passage = Sending(sent)
    for _ in range(2):
        decoded(device, 1)
    assert counting.repeated == 2
    assert sent[0].data_ptr() != sent[1].data_ptr()
    assert not torch.equal(sent[0], sent[1])


class Sending:
    """The passage of a first stage whose parts are kept as they were sent."""

    first, last = True, False

    def __init__(self, sent):
        self.send = sent.append


@pytest.mark.parametrize(
    "order", [(Region.KV_CACHE, Region.WEIGHTS), (Region.WEIGHTS, Region.KV_CACHE)], ids=str
)
def test_recordings_go_with_what_they_read_and_come_back_with_all_of_it(plain, counting, order):
    device, eager = plain("llama"), plain("llama")
    executor = with_graphs(device, counting)
    for region in order:
        assert device.plane.release_memory([region]) is None
        assert not executor._graphs.holds(1)
    device.plane.restore_memory([order[0]])
    assert not executor._graphs.holds(1)
    device.plane.restore_memory([order[1]])
    assert executor._graphs.holds(1)
    for each in (device, eager):
        prefill(each)
    assert decoded(device, 3) == decoded(eager, 3)
    assert counting.repeated == 3


def test_other_weights_are_recorded_once_there_is_a_pool_to_write_to(plain, counting, checkpoint):
    device, eager = plain("llama"), plain("llama")
    executor = with_graphs(device, counting)
    _, other = checkpoint("llama")

    def update(each):
        assert each.plane.open_weights(DiskWeights(str(other))) is None
        assert each.plane.load_weights() is None
        each.plane.settle_weights(True)

    for each in (device, eager):
        update(each)
    assert counting.recorded == 2 * len(SIZES)
    assert device.plane.release_memory([Region.KV_CACHE]) is None
    update(device)
    assert not executor._graphs.holds(1)
    device.plane.restore_memory([Region.KV_CACHE])
    for each in (device, eager):
        prefill(each)
    assert decoded(device, 3) == decoded(eager, 3)
    assert counting.repeated == 3


def test_weights_that_are_dropped_take_recordings_along(plain, counting):
    device = plain("llama")
    executor = with_graphs(device, counting)
    device.plane.drop_weights()
    assert not executor._graphs.holds(1)


def test_weights_that_are_discarded_are_not_held_by_recordings(checkpoint, monkeypatch, counting):
    monkeypatch.setattr(backends, "find_kernels", lambda _: Found(None, "none are wanted"))
    config = small_config(checkpoint("llama")[1])
    policy = WeightUpdatePolicy.DISCARD
    device = Rig(replace(config, model=replace(config.model, weight_update_policy=policy)))
    try:
        executor = with_graphs(device, counting)
        executor.let_go()
        assert not executor._graphs.holds(1)
    finally:
        device.plane.shutdown()


# On CUDA, as it is built


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    load_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture
def thread():
    thread = ForwardThread()
    yield thread
    thread.stop()


@pytest.fixture
def library(monkeypatch, thread, guard, counting):
    """A device that is emulated, with the library and a recorder in place of CUDA's."""
    emulated(monkeypatch, thread)
    monkeypatch.setattr("drumline.device.build.CudaRecorder", lambda device: counting.record)
    library = PagedLibrary()
    library.__version__ = "9.9"
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: name == "flashinfer" or found(name, *of)
    )
    # In the type of what it is held against.
    monkeypatch.setattr(flashinfer_attention, "FLOATS", (torch.float32,))
    monkeypatch.setattr(flashinfer_attention, "pinned", torch.empty)
    return library


@pytest.mark.parametrize("family", ["llama, biased", "mistral, window"])
def test_a_device_repeats_decodes_that_say_what_the_host_does(
    checkpoint, rig, library, thread, counting, family
):
    expected = played(rig(family))
    device = Rig(small_config(checkpoint(family)[1]), thread, DEVICE)
    assert device.built.specs.backend == "torch, attention by FlashInfer 9.9"
    assert counting.recorded == len(SIZES)
    thread.serve_checked(ForwardChecks(DeviceChecks.ERROR, DEVICE))
    results = played(device)
    assert counting.repeated == 4
    for one, other in zip(results, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        close(one.logprobs, other.logprobs)


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        (GraphConfig(), SIZES),
        (GraphConfig(cuda_graph_max_bs=3), (1, 2, 3)),
        (GraphConfig(cuda_graph_bs=(6, 2, 2)), (2, 6)),
        (GraphConfig(cuda_graph=False), ()),
    ],
    ids=str,
)
def test_an_operator_says_what_is_recorded(checkpoint, library, thread, counting, asked, sizes):
    config = replace(small_config(checkpoint("llama")[1]), graph=asked)
    graphs = Rig(config, thread, DEVICE).built.handle._executor._graphs
    assert (graphs is None) == (not sizes)
    assert counting.recorded == len(sizes)
    if graphs is not None:
        assert tuple(graphs.sizes) == sizes


def test_too_little_memory_for_graphs_names_the_flag(checkpoint, library, thread, monkeypatch):

    def full(_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Executor, "record", full)
    with pytest.raises(ConfigError, match="--cuda-graph-max-bs: no memory is left for the 4"):
        Rig(small_config(checkpoint("llama")[1]), thread, DEVICE)
