"""Which generating requests are being served, and since when there have been any."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Gauge

from drumline.contract.ports import Clock
from drumline.core.errors import RequestError
from drumline.frontend.web.errors import REQUEST_ID_IN_USE, shutting_down


class LiveRequests:
    """The requests in flight, by the ids their clients know them by."""

    def __init__(self, clock: Clock, gauge: Gauge) -> None:
        self._clock = clock
        self._gauge = gauge
        self._tasks: dict[str, asyncio.Task[None] | None] = {}
        self._busy_since_us = 0
        self.draining = False
        """Set while the server stops: what is in flight goes on, nothing else begins."""
        self.broken_off = False
        """Set once what is in flight must end."""
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def busy_s(self) -> float:
        """Seconds for which there has been at least one request; zero without any."""
        return (self._clock.now_us() - self._busy_since_us) / 1e6 if self._tasks else 0.0

    @contextmanager
    def entered(self, request_id: str) -> Iterator[None]:
        """Count a request while it is being served.

        Raises RequestError 503 while draining, and 409 for an id in flight: the engine
        would drop the second without a word, and its client would wait for ever.
        """
        if self.draining:
            raise shutting_down()
        if request_id in self._tasks:
            raise RequestError(
                409,
                f"a request with the id {request_id!r} is in flight",
                param="X-Request-Id",
                code=REQUEST_ID_IN_USE,
            )
        if not self._tasks:
            self._busy_since_us = self._clock.now_us()
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
