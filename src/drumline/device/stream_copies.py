"""Copies between pinned host tiers and a KV pool on CUDA: on a stream of their own.

Nothing here waits for the device but a thread of its own, which tells when a copy is over. What is
computed and what is copied wait for each other on the device, by events.

Thread: forward thread, but for `check`.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from drumline.contract.arrays import IntArray
from drumline.contract.cache import BlockMoves
from drumline.contract.ports import Clock
from drumline.core.errors import InvariantError
from drumline.device.choice import use
from drumline.device.copying import Task, Work
from drumline.device.host_pool import HostPool, stretches
from drumline.device.kv import KvPool
from drumline.device.landing import LandingThread

_log = logging.getLogger(__name__)
_END_S = 60.0


class _Load:
    """What a plan loads for its own forward, which waits for all of it on the device."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event: torch.cuda.Event | None = event

    def wait(self, _layer: int) -> None:
        self.wait_all()

    def wait_all(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


class StreamCopies:
    """Implements `host_cache.Copies`.

    All copies are on one stream, in the order in which they were begun: what is loaded was
    stored before.
    """

    __slots__ = ("_failure", "_kv", "_landings", "_stream", "_work")

    def __init__(self, kv: KvPool, clock: Clock) -> None:
        self._kv = kv
        self._stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self._landings = LandingThread("copies")
        self._work = Work(clock)
        self._failure: BaseException | None = None

    def check(self) -> None:
        if self._failure is not None:
            error = f"a copy failed: {type(self._failure).__name__}: {self._failure}"
            raise InvariantError(error) from self._failure
        took_s = self._work.overdue_s()
        if took_s is not None:
            _log.warning("copies of %s have not come further for %.0f s", self._kv.device, took_s)

    def stop(self) -> None:
        self._landings.stop(_END_S)

    def store(self, pool: HostPool, moves: Iterable[BlockMoves], ended: Task) -> None:
        event = self._store(pool, moves, ended)
        # What is stored is given away: nothing may write there before it was read.
        torch.cuda.current_stream().wait_event(event)

    def begin_store(self, pool: HostPool, moves: Iterable[BlockMoves], ended: Task) -> None:
        self._store(pool, moves, ended)

    def load(self, pool: HostPool, moves: Sequence[BlockMoves], ended: Task) -> _Load | None:
        event = self._load(pool, moves)
        self._expect(event, ended)
        return _Load(event)

    def restore(self, parts: Sequence[tuple[HostPool, Iterable[BlockMoves]]], ended: Task) -> None:
        event = None
        for pool, moves in parts:
            event = self._load(pool, moves)
        assert event is not None, "a restore of nothing"
        self._expect(event, ended)

    def _store(self, pool: HostPool, moves: Iterable[BlockMoves], ended: Task) -> torch.cuda.Event:
        event = self._begin(pool.blocks, self._kv.bytes, *pool.taking(self._kv, moves))
        self._expect(event, ended)
        return event

    def _load(self, pool: HostPool, moves: Iterable[BlockMoves]) -> torch.cuda.Event:
        return self._begin(self._kv.bytes, pool.blocks, *pool.giving(self._kv, moves))

    def _begin(
        self, into: Tensor, out_of: Tensor, sources: IntArray, targets: IntArray
    ) -> torch.cuda.Event:
        """Copy blocks behind all that is queued; returns the event of their being there."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for source, target, count in stretches(sources, targets):
                # Whole blocks and their neighbours, one piece of memory on both sides.
                part = into[target : target + count]
                part.copy_(out_of[source : source + count], non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
        return event

    def _expect(self, event: torch.cuda.Event, ended: Task) -> None:
        self._landings.put(partial(self._end, event, ended))

    def _end(self, event: torch.cuda.Event, ended: Task) -> None:
        self._work.begin()
        try:
            use(self._kv.device)
            event.synchronize()
            ended()
        except BaseException as error:
            _log.exception("a copy failed")
            self._failure = self._failure or error
        self._work.end()
