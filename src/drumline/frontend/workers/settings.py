"""What a launcher tells an HTTP worker that it starts: one JSON line on standard input."""

import msgspec
from msgspec import Struct

from drumline.core.config import Config
from drumline.wire.handshake import Registration


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """Everything a worker must know; the model is a path by now, and served names are settled."""

    config: Config
    registration: Registration
    index: int
    channel_fd: int
    """The inherited end of the socket pair to the owner of the engine's link."""
    listener_fds: tuple[int, ...]
    """The inherited sockets, by worker, which listen already; it answers on its own, and on those
    of others while they do not."""
    launcher_pid: int


_decoder = msgspec.json.Decoder(WorkerSettings)


def encode_settings(settings: WorkerSettings) -> bytes:
    """Return the line a worker reads."""
    return msgspec.json.encode(settings) + b"\n"


def decode_settings(line: bytes) -> WorkerSettings:
    """Decode a settings line. Raises msgspec.DecodeError or ValidationError."""
    return _decoder.decode(line)
