"""Ends of a real mesh, each on a thread of this process."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

from drumline.collective.mesh import join
from drumline.collective.settings import MeshSettings, Seat
from drumline.core.clock import SystemClock

TOKEN = b"a secret of these ranks"


def listening():
    """Return a socket that listens on a free port, and its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def meshes(size, **settings):
    """Yield the ends of a mesh, in rank order."""
    listener, address = listening()
    with ThreadPoolExecutor(size) as pool:
        ends = list(
            pool.map(
                lambda index: join(
                    Seat(index, size, address, TOKEN),
                    MeshSettings(**settings),
                    SystemClock(),
                    listener if index == 0 else None,
                ),
                range(size),
            )
        )
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def together(ends, act):
    """Let `act` happen on every end at once; returns results or errors in rank order."""
    with ThreadPoolExecutor(len(ends)) as pool:
        futures = [pool.submit(act, end) for end in ends]
    return [future.exception() or future.result() for future in futures]
