"""What the operator's signals ask for: the first to finish and stop, the second to stop at once."""

import asyncio
import signal

STOPPING = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """The stop signals that came, as two futures.

    A callback only notes its signal; whoever awaits the future does the work.

    Thread: the main thread's event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first: asyncio.Future[int] = loop.create_future()
        """The number of the first signal."""
        self.second: asyncio.Future[int] = loop.create_future()
        """The number of the second signal."""
        for number in STOPPING:
            loop.add_signal_handler(number, self._caught, number)

    def _caught(self, number: int) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(number)
                return
