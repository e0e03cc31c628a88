"""Control calls that wait for their replies, one of every engine asked."""

import asyncio

from drumline.core.errors import PeerError
from drumline.wire.output import ControlReplySlim


class Calls:
    """The open control calls of a group. Thread: the event loop's."""

    def __init__(self) -> None:
        self._last_id = 0
        self._open: dict[tuple[int, int], asyncio.Future[ControlReplySlim]] = {}

    def opened(self, engines: int) -> tuple[int, list[asyncio.Future[ControlReplySlim]]]:
        """Return a fresh call id and a future for each engine's reply."""
        self._last_id += 1
        loop = asyncio.get_running_loop()
        futures = []
        for engine in range(engines):
            future: asyncio.Future[ControlReplySlim] = loop.create_future()
            self._open[self._last_id, engine] = future
            futures.append(future)
        return self._last_id, futures

    def answered(self, reply: ControlReplySlim) -> bool:
        """Hand a reply to its call; False when nobody waits for it."""
        future = self._open.pop((reply.call_id, reply.engine_index), None)
        if future is None or future.done():
            return False
        future.set_result(reply)
        return True

    def forget(self, call_id: int, engines: int) -> list[int]:
        """Give a call up; returns the engines that had not answered."""
        return [e for e in range(engines) if self._open.pop((call_id, e), None) is not None]

    def fail(self, reason: str) -> None:
        """End every open call: no reply will come."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(PeerError(reason))
        self._open.clear()
