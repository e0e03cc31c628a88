"""A forward waits for its own plan's load, layer by layer, and for no other."""

import threading
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from drumline.contract.cache import BlockMoves, CacheAck, LoadBack, Restore, Snapshot, WriteBack
from drumline.contract.plan import PageZeroes, TablePatch
from drumline.contract.ports import LogprobPlan
from drumline.core.config import CacheConfig, Config, Dtype, ModelConfig, ScheduleConfig
from drumline.core.errors import InvariantError
from drumline.device import thread_copies
from drumline.device.executor import Executor

from .conftest import Rig, ints
from .test_host_cache import settled

PROMPT = np.random.default_rng(8).integers(0, 320, 50).tolist()
LAYERS = 3
WANTED = LogprobPlan(ints(0), ints(0))


class Gates:
    """Holds back each step of every load until it is let go; counts what the forward computed."""

    def __init__(self, device):
        self.go = [threading.Event() for _ in range(LAYERS)]
        self.computed = []
        self.reached = [threading.Event() for _ in range(LAYERS)]
        program = device.built.handle._executor._model.program
        machine = program._machine

        def run(function, *arguments):
            if function == "layers":
                for layer in range(*arguments[-2:]):
                    self.computed.append(layer)
                    self.reached[layer].set()
            machine.run(function, *arguments)

        program._machine = Instead(machine, run=run)
        copies = device.built.handle._cache._copies
        start = copies._threads.start

        def held(steps, ended):
            if len(steps) != LAYERS:
                return start(steps, ended)
            return start(
                [
                    [partial(self._after, go, task) for task in tasks]
                    for go, tasks in zip(self.go, steps, strict=True)
                ],
                ended,
            )

        copies._threads = Instead(copies._threads, start=held)

    def _after(self, go, task):
        assert go.wait(20)
        task()

    def open(self):
        for go in self.go:
            go.set()


class Instead:
    """An object with other methods in place of some of its own."""

    def __init__(self, inner, **others):
        self._inner = inner
        self.__dict__ |= others

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def __len__(self):
        return len(self._inner)


@pytest.fixture
def device(checkpoint, monkeypatch):
    """A running device, each layer of whose loads is a step of its own, however little it is."""
    monkeypatch.setattr(thread_copies, "STEP_BYTES", 1)
    monkeypatch.setattr(thread_copies, "FENCED_BYTES", 1)
    made = Rig(
        Config(
            model=ModelConfig(model=str(checkpoint("llama")[1]), dtype=Dtype.FLOAT32),
            cache=CacheConfig(
                max_total_tokens=16 * 63, kvstore=True, retraction_snapshot_max_requests=2
            ),
            schedule=ScheduleConfig(max_num_seqs=8),
        )
    )
    yield made
    made.plane.shutdown()


def moves(sources, targets):
    return BlockMoves(0, ints(*sources), ints(*targets))


def answered(result):
    return result.tokens.item(), result.logprobs[0].sampled[0]


def stored(device):
    """Compute the prompt, store its full pages, and blank them; returns the answer."""
    parts = device.start(1, "a", PROMPT, blocks=range(1, 9))
    expected = answered(device.run(device.plan([(1, 100)], **parts), WANTED))
    device.execute(
        device.plan(cache_ops=(WriteBack(0, (moves([1, 2, 3], [3, 1, 2]),), pinned=True),))
    )
    assert settled(device) == [CacheAck(0)]
    return expected


def loading(device, row=2, op=1, blocks=(24, 22, 23, 21, 25)):
    """Return a plan that loads three pages and computes the two tokens behind them."""
    parts = device.start(row, f"b{op}", PROMPT, blocks=blocks)
    device.rows[row][1] = 48
    loaded = LoadBack(op, (moves([3, 1, 2], blocks[:3]),))
    blanked = (PageZeroes(0, ints(*blocks)),)
    return device.plan([(row, 100)], cache_ops=(loaded,), zeroes=blanked, **parts)


@pytest.mark.parametrize("late", range(LAYERS))
def test_a_late_copy_delays_the_layer_it_is_of_and_none_before(device, late):
    expected = stored(device)
    gates = Gates(device)
    for layer in range(late):
        gates.go[layer].set()
    ticket = device.execute(loading(device), WANTED)
    if late:
        assert gates.reached[late - 1].wait(20), "it waits for no more than it reads"
    assert not gates.reached[late].wait(0.1)
    assert gates.computed == list(range(late))
    assert device.plane.poll_cache_acks() == []
    gates.open()
    result = device.plane.complete(ticket)
    assert answered(result) == pytest.approx(expected, abs=1e-4)
    assert device.plane.poll_cache_acks() == [CacheAck(1)]


def test_a_forward_that_does_not_wait_reads_blank_pages(device, monkeypatch):
    # What the test above would see if the fence were forgotten.
    expected = stored(device)
    gates = Gates(device)
    run = Executor.run
    monkeypatch.setattr(Executor, "run", lambda self, *parts: run(self, *parts[:-1], None))
    result = device.run(loading(device), WANTED)
    assert abs(answered(result)[1] - expected[1]) > 1e-3
    gates.open()
    assert settled(device) == [CacheAck(1)]


def test_a_forward_waits_for_its_own_plan_s_load_and_the_next_for_none(device):
    expected = stored(device)
    gates = Gates(device)
    gates.open()
    fences = []
    executor = device.built.handle._executor

    def run(*parts):
        fences.append(parts[-1])
        return Executor.run(executor, *parts)

    device.built.handle._executor = Instead(executor, run=run)
    assert answered(device.run(loading(device), WANTED)) == pytest.approx(expected, abs=1e-4)
    device.run(device.plan(decodes=[2]), WANTED)
    again = loading(device, 3, 2, (34, 32, 33, 31, 35))
    assert answered(device.run(again, WANTED)) == pytest.approx(expected, abs=1e-4)
    assert fences[0] is not None
    assert fences[1] is None
    assert fences[2] not in {None, fences[0]}


def test_a_small_load_is_there_before_its_forward_and_wakes_nobody(device, monkeypatch):
    expected = stored(device)
    gates = Gates(device)
    block_bytes = device.built.handle._pool.layout.block_bytes
    monkeypatch.setattr(thread_copies, "FENCED_BYTES", 3 * block_bytes + 1)
    # No gate is opened.
    assert answered(device.run(loading(device), WANTED)) == pytest.approx(expected, abs=1e-4)
    assert device.plane.poll_cache_acks() == [CacheAck(1)]
    monkeypatch.setattr(thread_copies, "FENCED_BYTES", 3 * block_bytes)
    gates.reached[0].clear()
    ticket = device.execute(loading(device, 3, 2, (34, 32, 33, 31, 35)), WANTED)
    assert not gates.reached[0].wait(0.1)
    gates.open()
    assert answered(device.plane.complete(ticket)) == pytest.approx(expected, abs=1e-4)


def test_a_plan_that_loads_and_forwards_nothing_ends_behind_its_load(device):
    expected = stored(device)
    gates = Gates(device)
    plan = loading(device)
    loads = device.plan(cache_ops=plan.cache_ops, zeroes=plan.zeroes)
    device.execute(loads)
    # The next plan's forward reads these pages, and has no fence for them.
    follows = replace(plan, cache_ops=(), zeroes=())
    ticket = device.execute(follows, WANTED)
    assert not gates.reached[0].wait(0.1)
    gates.open()
    assert answered(device.plane.complete(ticket)) == pytest.approx(expected, abs=1e-4)


def test_no_forward_waits_for_a_restore_or_a_pinned_store(device):
    expected = stored(device)
    parts = device.start(4, "c", PROMPT, blocks=range(50, 58))
    device.run(device.plan([(4, 100)], **parts))
    device.execute(device.plan(cache_ops=(Snapshot(3, "c", 4, 1, (moves([53], [1]),)),)))
    assert settled(device) == [CacheAck(3)]
    go = threading.Event()
    copies = device.built.handle._cache._copies
    start = copies._threads.start

    def held(steps, ended):
        return start([[partial(wait, task) for task in tasks] for tasks in steps], ended)

    def wait(task):
        assert go.wait(20)
        task()

    copies._threads = Instead(copies._threads, start=held)
    ops = (
        Restore(4, "c", 5, 1, (moves([3, 1, 2], [40, 41, 42]),), (moves([1], [43]),)),
        WriteBack(5, (moves([1], [9]),), pinned=True),
    )
    patch = TablePatch(
        0, np.full(4, 5, np.int32), np.arange(4, dtype=np.int32), ints(*range(40, 44))
    )
    device.run(device.plan(decodes=[1], cache_ops=ops, patches=(patch,)))
    device.run(device.plan(decodes=[1]))
    assert device.plane.poll_cache_acks() == []
    go.set()
    assert settled(device, 2) == [CacheAck(4), CacheAck(5)]
    # Its pages came back whole: the same prompt's first pages, of either request.
    again = device.start(6, "d", PROMPT, blocks=[40, 41, 42, 44])
    device.rows[6][1] = 48
    result = device.run(device.plan([(6, 100)], **again), WANTED)
    assert answered(result) == pytest.approx(expected, abs=1e-4)


def test_a_copy_that_fails_stops_the_plane_with_its_cause(device):
    stored(device)
    gates = Gates(device)
    gates.go[0].set()
    gates._after = lambda go, task: 1 // 0
    ticket = device.execute(loading(device), WANTED)
    with pytest.raises(InvariantError, match="a copy failed: ZeroDivisionError"):
        device.plane.complete(ticket)
    with pytest.raises(InvariantError, match="ZeroDivisionError"):
        device.plane.poll_cache_acks()
