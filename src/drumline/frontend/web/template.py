"""Events that differ in one text alone: everything around it is encoded once."""

from collections.abc import Callable
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
_PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"


class EventTemplate:
    """An event with a place for a text."""

    __slots__ = ("_after", "_before")

    def __init__(self, body: Callable[[str], Any]) -> None:
        """Take the event from `body`, which is handed a text and puts it into one place."""
        place = _encode(_PLACE)
        # Told apart by two texts, as either might stand in what is around them.
        first, second = _encode(body(_PLACE)), _encode(body(""))
        at = _first_difference(first, second)
        self._before = first[: at - 1]
        self._after = first[at - 1 + len(place) :]

    def filled(self, text: str) -> bytes:
        """Return the event with `text` in its place."""
        return b"".join((self._before, _encode(text), self._after))


def _first_difference(one: bytes, other: bytes) -> int:
    return next(at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
