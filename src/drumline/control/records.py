"""What rounds were, in a few numbers each: what members compare, and what a broken one reports.

It is told once a round, keeps the last of them, and looks at nothing itself.
"""

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

KEPT_ROUNDS = 64


class Digest(Struct, frozen=True):
    """A round in a few numbers, the same on every member of a replica."""

    round: int = 0
    inputs: int = 0
    """What was relayed: messages and clock."""
    rows: int = 0
    """Which rows the batch has, and whose they are."""
    lengths: int = 0
    """How far each row is, and the prompt tokens it feeds."""
    blocks: int = 0
    """Table patches, zeroes, copies and cache operations."""
    requests: int = 0
    """Rows given to requests, and requests that the plan ended."""
    results: int = 0
    """The tokens that were committed."""


class RoundRecord(Struct, frozen=True):
    """What a round did, for the report of a broken invariant."""

    digest: Digest
    now_us: int
    messages: int
    rows: int
    tokens: int
    in_flight: int
    running: int


class Records:
    """The records of the last rounds, oldest first."""

    __slots__ = ("_kept",)

    def __init__(self, rounds: int = KEPT_ROUNDS) -> None:
        self._kept: deque[RoundRecord] = deque(maxlen=rounds)

    @property
    def kept(self) -> Sequence[RoundRecord]:
        return self._kept

    def add(self, record: RoundRecord) -> None:
        """Keep a round's record, and let go of the oldest where there are enough."""
        self._kept.append(record)

    def story(self) -> str:
        """Return the records, a line each."""
        return "the last rounds:\n" + "\n".join(f"  {record!r}" for record in self._kept)
