"""What is compared with what, and the ratio that drumline is to reach."""

from msgspec import Struct

from benchmarks.peers.engine import Side


class Bar(Struct, frozen=True):
    """The least (or most) that drumline's figure may be, as a multiple of the peer's."""

    ratio: float
    most: bool = False

    def holds(self, ratio: float) -> bool:
        return ratio <= self.ratio if self.most else ratio >= self.ratio

    def __str__(self) -> str:
        return f"{'≤' if self.most else '≥'} {self.ratio:g}"


class Contest(Struct, frozen=True):
    """Works that drumline and a peer do in turn, and what is compared of each."""

    peer: str
    ours: Side
    theirs: Side
    bars: dict[str, dict[str, Bar | None]]
    """By the work's name, then by the figure's; None is compared without a bar."""

    @property
    def works(self) -> list[str]:
        """The names under which the works are made: W5 is one that is asked twice."""
        return list(
            dict.fromkeys(name.removesuffix(" cold").removesuffix(" warm") for name in self.bars)
        )


_HTTP = Side(http=True)
_BF16 = Side("bf16")
_LATENCIES = ("TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms")

CONTESTS = [
    Contest(
        "openvino",
        Side(),
        Side(),
        {
            "W1": {"TTFT p50 ms": Bar(0.8, most=True), "decode tok/s": None},
            "W2": {"output tok/s": Bar(2.0)},
            "W3": {"output tok/s": Bar(1.5)},
            "W4": {"prompt tok/s": Bar(1.35)},
            "W5 cold": {"req/s": None, "TTFT p50 ms": None},
            "W5 warm": {"req/s": None, "TTFT p50 ms": None},
            "W6": dict.fromkeys(_LATENCIES),
        },
    ),
    Contest(
        "openvino", _BF16, _BF16, {"W1": {"decode tok/s": None}, "W4": {"prompt tok/s": Bar(1.1)}}
    ),
    Contest(
        "llama.cpp",
        Side(),
        _HTTP,
        {"W1": {"decode tok/s": Bar(2.2), "TTFT p50 ms": None}},
    ),
    Contest("llama.cpp", Side(), Side("q4_0", http=True), {"W1": {"decode tok/s": Bar(1.6)}}),
    Contest("llama.cpp", _BF16, Side("bf16", http=True), {"W1": {"decode tok/s": Bar(1.1)}}),
    Contest(
        "llama.cpp",
        _HTTP,
        _HTTP,
        {
            "W2": {"output tok/s": None},
            "W3": {"output tok/s": None},
            "W4": {"prompt tok/s": None},
            "W5 cold": {"req/s": None},
            "W5 warm": {"req/s": None},
            "W6": dict.fromkeys(_LATENCIES),
        },
    ),
    Contest(
        "vllm",
        _HTTP,
        Side("bf16", http=True),
        {
            "W1": {"decode tok/s": None, "TTFT p50 ms": None},
            "W2": {"output tok/s": Bar(2.5)},
            "W3": {"output tok/s": Bar(2.0)},
            "W4": {"prompt tok/s": None},
            "W5 cold": {"req/s": Bar(1.5), "TTFT p50 ms": None},
            "W5 warm": {"req/s": Bar(1.5), "TTFT p50 ms": None},
            "W6": dict.fromkeys(_LATENCIES, Bar(1.0, most=True)),
        },
    ),
]
