"""Cutting a stream of text at the first stop string.

The first match is the one whose last character comes first; among those that end
there, the longest. That does not depend on how the text is cut into chunks, and
generation can stop the moment a match is complete. Text that may still turn out
to be the beginning of a match is held back, so no part of one is ever emitted.
"""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one stream, matched over everything it was given."""

    __slots__ = ("_held", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """Match `stops`, none of which may be empty."""
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the stream."""

    def add(self, text: str) -> str:
        """Return what of the stream may be emitted now; nothing once a stop string matched."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        first = self._first_match(text)
        if first is not None:
            start, self.matched = first
            self._held = ""
            return text[:start]
        kept = len(text) - self._unsure(text)
        self._held = text[kept:]
        return text[:kept]

    def finish(self) -> str:
        """Return what was held back: the stream ended, so it is no stop string's beginning."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        first: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                match = (start + len(stop), start, stop)
                first = match if first is None else min(first, match)
        return None if first is None else first[1:]

    def _unsure(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
