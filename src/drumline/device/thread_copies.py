"""Copies between host tiers and a KV pool that is host memory too: by threads, step by step.

A load of some size comes a few layers at a time, and each layer of its forward waits for its part.

Thread: forward thread, but for `check`.
"""

from collections.abc import Iterable, Sequence

from drumline.contract.cache import BlockMoves
from drumline.contract.ports import Clock
from drumline.device.copying import CopyThreads, Steps, Task
from drumline.device.host_pool import HostPool
from drumline.device.kv import KvPool

STEP_BYTES = 192 << 10
"""Of one block, what a step of a load brings at least: less, and the calls cost more than
the copying. A layer of a large model is more than that."""
FENCED_BYTES = 16 << 20
"""A load of less is done before its forward, by the forward's thread too: to wake others and
to wait for them step by step would take a good part of what the copying takes."""


class _Load:
    """What a plan loads for its own forward: which layers of it are there."""

    __slots__ = ("_step_layers", "_steps")

    def __init__(self, steps: Steps, step_layers: int) -> None:
        self._steps = steps
        self._step_layers = step_layers

    def wait(self, layer: int) -> None:
        self._steps.wait(layer // self._step_layers)

    def wait_all(self) -> None:
        self._steps.wait_all()


class ThreadCopies:
    """Implements `host_cache.Copies`."""

    __slots__ = ("_kv", "_threads")

    def __init__(self, kv: KvPool, threads: int, clock: Clock) -> None:
        self._kv = kv
        self._threads = CopyThreads(threads, clock)

    def check(self) -> None:
        self._threads.check()

    def stop(self) -> None:
        self._threads.stop()

    def store(self, pool: HostPool, moves: Iterable[BlockMoves], ended: Task) -> None:
        # This thread is one of those that copy, as it waits for the others anyway.
        self._threads.run(pool.stores(self._kv, moves, len(self._threads)))
        ended()

    def begin_store(self, pool: HostPool, moves: Iterable[BlockMoves], ended: Task) -> None:
        self._threads.start([pool.stores(self._kv, moves, len(self._threads))], ended)

    def load(self, pool: HostPool, moves: Sequence[BlockMoves], ended: Task) -> _Load | None:
        layout = self._kv.layout
        if sum(len(move.sources) for move in moves) * layout.block_bytes < FENCED_BYTES:
            (tasks,) = pool.loads(self._kv, moves, len(self._threads), layout.fields)
            self._threads.run(tasks)
            ended()
            return None
        step_layers = max(1, STEP_BYTES // (2 * layout.field_bytes))
        steps = pool.loads(self._kv, moves, len(self._threads), 2 * step_layers)
        return _Load(self._threads.start(steps, ended), step_layers)

    def restore(self, parts: Sequence[tuple[HostPool, Iterable[BlockMoves]]], ended: Task) -> None:
        tasks: list[list[Task]] = []
        for pool, moves in parts:
            tasks += pool.loads(self._kv, moves, len(self._threads), self._kv.layout.fields)
        self._threads.start(tasks, ended)
