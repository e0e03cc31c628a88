"""Which generating requests are being served."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from prometheus_client import Gauge

from drumline.core.errors import RequestError
from drumline.frontend.web.errors import REQUEST_ID_IN_USE, TOO_MANY, shutting_down

Abort = Callable[[], int]
"""Ends answers; returns how many were still growing."""


class LiveRequests:
    """The requests in flight, by the ids their clients know them by."""

    def __init__(self, gauge: Gauge, most: int | None = None) -> None:
        """Count on `gauge`; let in `most` at the same time, any number by default."""
        self._gauge = gauge
        self._most = most
        self._tasks: dict[str, asyncio.Task[None] | None] = {}
        self._aborts: dict[str, Abort] = {}
        self._doomed: set[str] = set()
        """Ids that were to be ended before anything had begun under them."""
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
            raise too_many(self._most)
        if request_id in self._tasks:
            raise in_use(request_id, "X-Request-Id")
        if not self._tasks:
            self.idle.clear()
        self._tasks[request_id] = asyncio.current_task()
        self._gauge.inc()
        try:
            yield
        finally:
            del self._tasks[request_id]
            self._doomed.discard(request_id)
            self._gauge.dec()
            if not self._tasks:
                self.idle.set()

    @contextmanager
    def abortable(self, own: str, aborts: Mapping[str, Abort]) -> Iterator[None]:
        """Let the request `own` be ended under several ids while it generates.

        Raises RequestError 409 for an id of another request.
        """
        for name in aborts:
            if name in self._aborts or (name != own and name in self._tasks):
                raise in_use(name, "rid")
        self._aborts |= aborts
        try:
            if own in self._doomed:
                aborts[own]()
            yield
        finally:
            for name in aborts:
                del self._aborts[name]

    def abort(self, name: str) -> int:
        """End what goes by this id; returns how many answers that were still growing."""
        known = self._aborts.get(name)
        if known is not None:
            return known()
        if name in self._tasks:
            self._doomed.add(name)
            return 1
        return 0

    def abort_named(self, names: Sequence[str] | None) -> int:
        """End what goes by these ids, or all; returns how many answers were still growing."""
        return sum([self.abort(name) for name in (list(self._tasks) if names is None else names)])

    def break_off(self) -> None:
        """Cancel everything in flight; who is cancelled finds `broken_off` set."""
        self.broken_off = True
        for task in self._tasks.values():
            if task is not None:
                task.cancel()


def too_many(most: int) -> RequestError:
    """Return the refusal of a request beyond the `most` that are let in."""
    return RequestError(
        429, f"{most} requests are being answered, which is the limit", code=TOO_MANY
    )


def in_use(name: str, param: str) -> RequestError:
    """Return the refusal of an id that is in flight, given in `param`."""
    return RequestError(
        409, f"a request with the id {name!r} is in flight", param=param, code=REQUEST_ID_IN_USE
    )
