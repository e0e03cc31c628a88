"""The operators' operations that run, each of which is answered before the server ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from drumline.frontend.web.errors import shutting_down

T = TypeVar("T")


class Running:
    """Operations that run. Thread: the event loop's."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._over = asyncio.Event()

    async def answered(self, operation: Coroutine[Any, Any, T]) -> T:
        """Run an operation to its end and return what it does.

        Raises RequestError 503 where the server ends first; what was asked of engines may still
        be done.
        """
        task = asyncio.create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        if not task.done():
            raise shutting_down()
        return task.result()

    async def ended(self, timeout_s: float | None = None) -> None:
        """Wait until none runs any more, for so long at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def break_off(self) -> None:
        """Answer those that run without waiting for their ends."""
        self._over.set()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # Nobody may be left to hear of it.
        if not task.cancelled():
            task.exception()
