"""Which generating requests are being served."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Gauge

from drumline.core.errors import RequestError
from drumline.frontend.web.errors import REQUEST_ID_IN_USE, TOO_MANY, shutting_down


class LiveRequests:
    """The requests in flight, by the ids their clients know them by."""

    def __init__(self, gauge: Gauge, most: int | None = None) -> None:
        """Count on `gauge`; let in `most` at the same time, any number by default."""
        self._gauge = gauge
        self._most = most
        self._tasks: dict[str, asyncio.Task[None] | None] = {}
        self.draining = False
        """Set while the server stops: what is in flight goes on, nothing else begins."""
        self.broken_off = False
        """Set once what is in flight must end."""
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def entered(self, request_id: str) -> Iterator[None]:
        """Count a request while it is being served.

        Raises RequestError 503 while draining, 429 over the limit, and 409 for an id in
        flight: the engine would drop the second without a word, and its client would wait
        for ever.
        """
        if self.draining:
            raise shutting_down()
        if self._most is not None and len(self._tasks) >= self._most:
            raise RequestError(
                429, f"{self._most} requests are being answered, which is the limit", code=TOO_MANY
            )
        if request_id in self._tasks:
            raise RequestError(
                409,
                f"a request with the id {request_id!r} is in flight",
                param="X-Request-Id",
                code=REQUEST_ID_IN_USE,
            )
        if not self._tasks:
            self.idle.clear()
        self._tasks[request_id] = asyncio.current_task()
        self._gauge.inc()
        try:
            yield
        finally:
            del self._tasks[request_id]
            self._gauge.dec()
            if not self._tasks:
                self.idle.set()

    def break_off(self) -> None:
        """Cancel everything in flight; who is cancelled finds `broken_off` set."""
        self.broken_off = True
        for task in self._tasks.values():
            if task is not None:
                task.cancel()
