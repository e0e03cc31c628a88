"""What a launcher and the ranks it starts say to each other, outside the frontend's wire.

A rank reads its settings, one JSON line, from its standard input; the pipe stays
open for as long as the launcher lives, so its end means the launcher is gone. The
rank writes reports, one JSON line each, to a pipe of its own that it holds open
until it ends.
"""

import msgspec
from msgspec import Struct

from drumline.core.config import Config

AHEAD = "--ahead"
"""A rank that is started with this, and its launcher's pid, loads its modules before it reads its
settings."""
EXIT_FAILED = 1
"""The engine could not start, or broke."""
EXIT_OPERATOR = 2
"""The operator asked for what cannot be done, and can mend it."""


class Meeting(Struct, frozen=True):
    """Where the ranks of an engine find each other."""

    address: str
    """Rank 0 listens here."""
    token: str
    """A secret that they share, in hexadecimal digits."""
    listener_fd: int | None = None
    """Rank 0's inherited descriptor of the socket that listens there."""


class RankSettings(Struct, frozen=True, kw_only=True):
    """What a rank must know to build itself; the model is a path by now."""

    config: Config
    handshake: str
    """The frontend's handshake address, which the first rank of every replica dials."""
    engine_index: int = 0
    rank: int = 0
    meeting: Meeting | None = None
    """None for a rank that is alone."""
    report_fd: int
    """The inherited descriptor that takes the reports."""
    launcher_pid: int


class Step(Struct, frozen=True, tag="step"):
    """The rank begins a part of its start-up."""

    name: str


class Ready(Struct, frozen=True, tag="ready"):
    """The rank serves."""

    summary: str
    """One line for the log: model, pool and back end."""


class Failed(Struct, frozen=True, tag="failed"):
    """The rank could not start, or broke; it ends with `exit_code`."""

    step: str
    reason: str
    exit_code: int
    setting: str = ""
    """What the operator can mend, where that is the cause."""
    of_peer: bool = False
    """Another process's end or word is the cause, not anything of this rank's."""


Report = Step | Ready | Failed

_settings_decoder = msgspec.json.Decoder(RankSettings)
_report_decoder = msgspec.json.Decoder(Report)


def encode_settings(settings: RankSettings) -> bytes:
    """Return the line a rank reads."""
    return msgspec.json.encode(settings) + b"\n"


def decode_settings(line: bytes) -> RankSettings:
    """Decode a settings line. Raises msgspec.DecodeError or ValidationError."""
    return _settings_decoder.decode(line)


def encode_report(report: Report) -> bytes:
    """Return the line a launcher reads."""
    return msgspec.json.encode(report) + b"\n"


def decode_report(line: bytes) -> Report:
    """Decode a report line. Raises msgspec.DecodeError or ValidationError."""
    return _report_decoder.decode(line)
