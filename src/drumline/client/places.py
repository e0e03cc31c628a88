"""Where a client's sockets bind, and where engines dial them."""

from typing import Any

import zmq

from drumline.core.errors import ConfigError


def beside(address: str, suffix: str) -> str:
    """Return where a data socket binds: a free port of the host, or a path beside the path.

    Raises ConfigError for an address that no engine can dial.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return f"ipc://{rest}{suffix}"
    host = rest.rpartition(":")[0]
    if scheme != "tcp" or not host or host in {"*", "0.0.0.0", "[::]"}:
        raise ConfigError(address, "engines need one host to dial; write tcp://HOST:PORT")
    return f"tcp://{host}:*"


def endpoint(socket: "zmq.Socket[Any]") -> str:
    """Return where a bound socket is dialled, its port included."""
    place: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]  # bytes option
    return place.rstrip(b"\0").decode()
