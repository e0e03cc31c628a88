"""What is asked: prompts of random tokens, answers of a length, and when each request comes.

Prompts are drawn from a seed, which every run has another of, so that no prefix cache finds
what was computed for an earlier run; both sides of a run are asked the same.
"""

import random
from collections.abc import Callable

from msgspec import Struct

_FIRST_TOKEN, _LAST_TOKEN = 1000, 40_000  # ordinary words of the embedded model's vocabulary
RATE = 4.0
"""Requests a second of W6."""


class Work(Struct, frozen=True):
    """Requests that are measured together. Answers never end before their length."""

    name: str
    prompts: list[list[int]]
    tokens: list[int]
    arrivals: list[float]
    """Seconds after the work begins; all 0 where they come at once."""


class Sizes(Struct, frozen=True):
    """What `--quick` and tests make smaller."""

    vocabulary: tuple[int, int] = (_FIRST_TOKEN, _LAST_TOKEN)
    share: float = 1.0
    """Of the lengths of prompts and answers, and of contexts."""
    requests: float = 1.0
    """Of the requests of a work."""
    seconds: float = 30.0
    """For which requests come in W6."""


def _drawn(lots: random.Random, sizes: Sizes, length: int) -> list[int]:
    count = max(2, round(length * sizes.share))
    return [lots.randrange(*sizes.vocabulary) for _ in range(count)]


def _at_once(name: str, sizes: Sizes, prompts: list[list[int]], tokens: int) -> Work:
    # At least two tokens where an answer is to have a rate.
    length = 1 if tokens == 1 else max(2, round(tokens * sizes.share))
    return Work(name, prompts, [length] * len(prompts), [0.0] * len(prompts))


def _plain(name: str, streams: int, prompt: int, tokens: int) -> "Make":
    def make(sizes: Sizes, seed: int) -> list[Work]:
        lots = random.Random(f"{name} {seed}")
        count = max(1, round(streams * sizes.requests))
        prompts = [_drawn(lots, sizes, prompt) for _ in range(count)]
        return [_at_once(name, sizes, prompts, tokens)]

    return make


def _shared_prefix(sizes: Sizes, seed: int) -> list[Work]:
    lots = random.Random(f"W5 {seed}")
    prefix = _drawn(lots, sizes, 1024)
    count = max(1, round(32 * sizes.requests))
    return [
        _at_once(name, sizes, [prefix + _drawn(lots, sizes, 32) for _ in range(count)], 32)
        for name in ("W5 cold", "W5 warm")
    ]


def _arriving(sizes: Sizes, seed: int) -> list[Work]:
    lots = random.Random(f"W6 {seed}")
    arrivals: list[float] = []
    at = lots.expovariate(RATE)
    while at < sizes.seconds or not arrivals:
        arrivals.append(at)
        at += lots.expovariate(RATE)
    prompts = [_drawn(lots, sizes, lots.randint(64, 192)) for _ in arrivals]
    tokens = [max(2, round(lots.randint(32, 96) * sizes.share)) for _ in arrivals]
    return [Work("W6", prompts, tokens, arrivals)]


Make = Callable[[Sizes, int], list[Work]]
"""Sizes and a seed to works, which one engine does one after the other."""

WORKS: dict[str, Make] = {
    "W1": _plain("W1", 1, 128, 128),
    "W2": _plain("W2", 16, 128, 128),
    "W3": _plain("W3", 64, 128, 64),
    "W4": _plain("W4", 8, 1024, 1),
    "W5": _shared_prefix,
    "W6": _arriving,
    "context 256": _plain("context 256", 1, 256, 64),
    "context 4096": _plain("context 4096", 1, 4096, 64),
}
WARM = _plain("warm", 4, 192, 16)
