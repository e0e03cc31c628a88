"""Where an engine is, as its end of the link says while the loop itself may say nothing.

A frontend asks by the name of a call. Engines of other makes answer that they know no such
operation.
"""

import msgspec
from msgspec import Struct

PROGRESS = "progress"


class Progress(Struct, frozen=True):
    """The round that an engine is in, counted from 1, and for how long."""

    round: int
    seconds: float


_decode = msgspec.json.Decoder(Progress).decode


def encode_progress(progress: Progress) -> str:
    """Return the message of a reply."""
    return msgspec.json.encode(progress).decode()


def decode_progress(message: str | None) -> Progress | None:
    """Return what a reply's message says; None for one that is no such thing."""
    try:
        return _decode(message or "")
    except msgspec.DecodeError:
        return None
