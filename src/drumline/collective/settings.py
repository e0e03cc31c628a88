"""What a rank is told about its mesh: its seat, and how patient it is.

It does not know how connections are made or what travels on them.
"""

from collections.abc import Iterable

from msgspec import Struct

from drumline.core.errors import ConfigError

_LONGEST_BEAT_S = 0.5
_LONGEST_QUIET_S = 2.0
_MISSES = 10


class Seat(Struct, frozen=True):
    """One rank's place in a mesh of `size` ranks.

    `address` is `host:port` of rank 0, the same on every rank. `token` is a secret that all
    ranks share; a connection that does not show it is refused. Ranks are numbered machine by
    machine, `node_ranks` on each; 0 where that tells nobody anything.
    """

    index: int
    size: int
    address: str
    token: bytes
    node_ranks: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("mesh size", f"{self.size} ranks make no mesh; at least 1")
        if not 0 <= self.index < self.size:
            raise ConfigError(
                "mesh index", f"rank {self.index} of {self.size}; 0 to {self.size - 1} exist"
            )
        if self.size > 1 and not self.token:
            raise ConfigError("mesh token", "empty; every rank needs the same secret")

    def named(self, ranks: Iterable[int]) -> str:
        """Return the numbers of ranks, and where they run: `2, 3 of 4 (node 1)`."""
        numbers = sorted(ranks)
        text = f"{', '.join(map(str, numbers))} of {self.size}"
        if not self.node_ranks:
            return text
        nodes = sorted({number // self.node_ranks for number in numbers})
        return f"{text} (node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))})"


class MeshSettings(Struct, frozen=True, kw_only=True):
    """How long a mesh waits, what it reports meanwhile, and how large a frame may be.

    `startup_timeout_s` bounds the start-up of the whole mesh.

    `peer_timeout_s` is the silence after which a peer is given up: every exchange then raises
    PeerError, on every rank. Silence is counted in missed heartbeats, which come from a thread
    of their own, so a peer that is alive is waited for however long its round takes. It is
    logged from `quiet_s` on, well before. None never gives a silent peer up: it is reported
    and waited for, which suits a process that somebody stops and continues in a debugger. A
    peer whose process ended is noticed at once in either case.

    `wait_report_s` is the age at which a wait for a living peer is first logged; the age
    doubles from one report to the next.

    `max_frame_bytes` bounds what one rank may put into one exchange.
    """

    startup_timeout_s: float = 60.0
    startup_report_s: float = 10.0
    peer_timeout_s: float | None = 5.0
    wait_report_s: float = 5.0
    max_frame_bytes: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        limits = {
            "startup_timeout_s": self.startup_timeout_s,
            "startup_report_s": self.startup_report_s,
            "peer_timeout_s": 1 if self.peer_timeout_s is None else self.peer_timeout_s,
            "wait_report_s": self.wait_report_s,
            "max_frame_bytes": self.max_frame_bytes,
        }
        for name, value in limits.items():
            if not value > 0:
                raise ConfigError(f"mesh {name}", f"{value} is not above zero")

    @property
    def beat_s(self) -> float:
        """Seconds from one heartbeat to the next."""
        if self.peer_timeout_s is None:
            return _LONGEST_BEAT_S
        return min(_LONGEST_BEAT_S, self.peer_timeout_s / _MISSES)

    @property
    def quiet_s(self) -> float:
        """Seconds of silence after which a peer is first reported."""
        if self.peer_timeout_s is None:
            return _LONGEST_QUIET_S
        return min(_LONGEST_QUIET_S, self.peer_timeout_s / 2)
