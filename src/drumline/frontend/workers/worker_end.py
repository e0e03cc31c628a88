"""One worker as the owner of the engine's link sees it: its requests, and what waits for it.

What a worker has not taken yet is one delta for each of its requests, so that one that hangs
costs what its answers are long, and holds up nobody else.
"""

import asyncio
from typing import Any, Protocol

from msgspec import Struct

from drumline.client.engine_client import EngineClient
from drumline.client.stream import Delta, merged
from drumline.core.errors import PeerError, RequestError
from drumline.frontend.workers.channel import Channel
from drumline.frontend.workers.counted import Family
from drumline.frontend.workers.messages import (
    Asking,
    Cancel,
    FromWorker,
    Idle,
    Leave,
    Release,
    Rows,
    Serving,
    Submit,
    decode_from_worker,
)

_UNAVAILABLE = 503


class Owner(Protocol):
    """What a worker's end asks of the hub."""

    def answer(self, worker: "WorkerEnd", number: int, question: Any) -> None: ...

    def release(self, worker: "WorkerEnd", number: int) -> None: ...

    def serves(self, worker: "WorkerEnd") -> None: ...

    def idle(self) -> None: ...


class WorkerEnd:
    """The owner's end of one worker. Thread: the event loop's."""

    def __init__(self, index: int, engine: EngineClient, owner: Owner) -> None:
        self.index = index
        self._engine = engine
        self._owner = owner
        self._requests: dict[str, Routed] = {}
        self._pending: dict[str, Delta] = {}
        self._flushing = False
        self.channel: Channel[FromWorker] = Channel(decode_from_worker, self._heard)
        self.channel.on_writable = self._flush
        self.serving = asyncio.Event()
        """Set once the worker answers connections."""
        self.idle = False
        """Whether it said, while draining, that nothing is in flight."""
        self.claims: dict[int, list[str]] = {}
        self.counted: set[int] = set()
        """Claims that take a place each."""
        self.told: list[Family] = []
        """What it last said it had counted."""

    def send(self, message: Struct) -> None:
        """Tell the worker something."""
        self.channel.send(message)

    async def ask(self, question: Any, timeout_s: float) -> Any:
        """Return the worker's answer. Raises PeerError when it is gone or does not answer."""
        return await self.channel.ask(question, self.channel.number(), timeout_s)

    def push(self, rid: str, delta: Delta) -> None:
        """Hand over what the engine said of a request, with all that comes in this pass."""
        if delta.finished_reason:
            self._requests.pop(rid, None)
        waiting = self._pending.get(rid)
        self._pending[rid] = delta if waiting is None else merged(waiting, delta)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def leave_all(self) -> None:
        """End every request of a worker that is gone."""
        for routed in list(self._requests.values()):
            routed.leave()
        self._requests.clear()
        self._pending.clear()

    def _flush(self) -> None:
        self._flushing = False
        if self._pending and self.channel.writable:
            self.send(Rows(list(self._pending), list(self._pending.values())))
            self._pending.clear()

    def _heard(self, message: FromWorker) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Leave():
                routed = self._requests.pop(message.rid, None)
                self._pending.pop(message.rid, None)
                if routed is not None:
                    routed.leave()
            case Cancel():
                known = self._requests.get(message.rid)
                if known is not None:
                    self._engine.cancel(known)
            case Asking():
                self._owner.answer(self, message.number, message.question)
            case Release():
                self._owner.release(self, message.number)
            case Serving():
                self.serving.set()
                self._owner.serves(self)
            case Idle():
                self.idle = True
                self._owner.idle()

    def _submit(self, message: Submit) -> None:
        rid = str(message.request.rid)
        try:
            self._requests[rid] = self._engine.submit(
                message.request, lambda rid, engine, left: Routed(rid, engine, left, self)
            )
        except RequestError as error:
            self._refused(rid, error.message, error.status)
        except PeerError as error:
            self._refused(rid, f"the engine is gone: {error}", _UNAVAILABLE)

    def _refused(self, rid: str, message: str, status: int) -> None:
        details = {"message": message, "status_code": status}
        self.push(rid, Delta([], "abort", 0, 0, 0, details=details))


class Routed:
    """One request on its way through to a worker."""

    __slots__ = ("_left", "_worker", "ended", "engine_index", "rid")

    def __init__(self, rid: str, engine_index: int, left: Any, worker: WorkerEnd) -> None:
        self.rid = rid
        self.engine_index = engine_index
        self.ended = False
        self._left = left
        self._worker = worker

    def push(self, delta: Delta) -> None:
        """Pass on what the engine said."""
        if delta.finished_reason:
            self.ended = True
        self._worker.push(self.rid, delta)

    def fail(self, reason: str) -> None:
        """End with the engine; the worker is told of that by itself."""
        self.ended = True

    def leave(self) -> None:
        """Tell the engine that nobody waits for this."""
        if not self.ended:
            self.ended = True
            self._left(self)
