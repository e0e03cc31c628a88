"""What to tell of the cache: the net change of what is findable, at each drain.

A boundary is told of once every group has all its blocks there, and taken back with the
first one that goes; what came and went between two drains is not told at all. A boundary
is named by the one before it; without that, no prompt reaches it, and it is not told of.
Nor are salted prefixes, which are nobody else's. It knows boundaries by digest, and
neither requests nor readers.
"""

import numpy as np
from msgspec import Struct

from drumline.contract.kv_events import BlockRemoved, BlockStored, KvEvent
from drumline.core.hashing import event_hash
from drumline.scheduler.prefix import PrefixIndex


class _Named(Struct, frozen=True):
    """What a boundary stands for."""

    event_hash: int
    parent: int | None
    tokens: bytes


class KvEvents:
    """Names boundaries, and watches an index for those that come and go."""

    __slots__ = ("_index", "_named", "_told")

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        index.touched = {}
        self._named: dict[bytes, _Named] = {}
        """The boundaries that are in the index: the blocks of one may come one by one, and late."""
        self._told: dict[bytes, int] = {}
        """The boundaries that readers know of, and where they end."""

    def name(self, prior: bytes, digest: bytes, tokens: bytes, extra: bytes = b"") -> None:
        """Learn what the boundary `digest` stands for, before it is offered to the index.

        `tokens` are those of the page or tail behind `prior`, as int32 bytes.
        """
        if extra or digest in self._named:
            return
        parent = self._named.get(prior)
        if prior and parent is None:
            return
        before = None if parent is None else parent.event_hash
        self._named[digest] = _Named(event_hash(before, tokens), before, tokens)

    def drain(self) -> list[KvEvent]:
        """Return the net change since the last drain: removals, children first; then parents."""
        touched, self._index.touched = self._index.touched, {}
        stored: list[tuple[int, bytes]] = []
        removed: list[tuple[int, bytes]] = []
        for digest in touched or ():
            end, told = self._index.complete(digest), self._told.get(digest)
            if told is not None and not end:
                removed.append((told, digest))
            elif told is None and end and digest in self._named:
                stored.append((end, digest))
        events: list[KvEvent] = []
        for _end, digest in sorted(removed, key=_by_end, reverse=True):
            del self._told[digest]
            events.append(BlockRemoved(self._named[digest].event_hash))
        for end, digest in sorted(stored, key=_by_end):
            self._told[digest] = end
            named = self._named[digest]
            ids = tuple(np.frombuffer(named.tokens, np.int32).tolist())
            events.append(BlockStored(named.event_hash, named.parent, ids))
        for digest in touched or ():
            if not self._index.find(digest):
                self._named.pop(digest, None)
        return events


def _by_end(boundary: tuple[int, bytes]) -> int:
    return boundary[0]
