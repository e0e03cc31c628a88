"""Turns at the event loop, so that a burst of requests does not hold up everybody else.

Checking a request and encoding its prompt takes milliseconds. The loop runs all that is
ready before it looks at its sockets again: of a hundred requests that arrive together it
would prepare all in one go, while streams stand still and a health check waits.
"""

import asyncio


class Turns:
    """Lets one task through in each pass of the loop, in the order in which they came.

    Thread: one event loop's.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def mine(self) -> None:
        """Wait for a turn. What follows, up to the next wait, is alone in its pass."""
        async with self._lock:
            await asyncio.sleep(0)
