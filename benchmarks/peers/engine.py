"""What every engine that is measured can do, and what it tells of the answers it gave."""

from typing import Protocol

from msgspec import Struct

from benchmarks.peers.work import Work


class PeerFailed(Exception):  # noqa: N818 - a fact about a peer, told by name and reason
    """A peer cannot be installed, started or measured; the message says why."""


class Answer(Struct, frozen=True):
    """When the tokens of one answer came, in seconds of one clock for all answers of a work."""

    began: float
    stamps: list[float]
    """When the answer had grown, once a chunk."""
    counts: list[int]
    """How many tokens it had by then."""
    decode_s: float | None = None
    """How long the engine says that it took for all tokens but the first, where it says so."""

    @property
    def tokens(self) -> int:
        return self.counts[-1] if self.counts else 0


class Engine(Protocol):
    """One engine with one model, reached in one way."""

    @property
    def pid(self) -> int:
        """The process at the top of its tree. Raises PeerFailed where it does not run."""

    def start(self) -> None:
        """Start it and wait until it serves. Raises PeerFailed."""

    def measure(self, work: Work) -> list[Answer]:
        """Have it do a work; return its answers in order. Raises PeerFailed."""

    def stop(self) -> None:
        """End it, in whatever state it is; does nothing the second time."""


class Side(Struct, frozen=True):
    """Which model an engine has, and how it is reached."""

    model: str = "embedded"
    """`embedded` (4-bit), `q4_0` or `bf16` weights made of it."""
    http: bool = False

    def __str__(self) -> str:
        return f"{self.model}, {'HTTP' if self.http else 'in process'}"


class Peer(Protocol):
    """One project: how it is installed and what engines it gives."""

    name: str

    def install(self) -> str:
        """Install what is not there yet; return the version. Raises PeerFailed."""

    def engine(self, side: Side) -> Engine:
        """Return an engine, not started. Raises PeerFailed where it has none like this."""
