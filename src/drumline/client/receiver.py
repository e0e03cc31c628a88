"""Who takes what engines say of requests, as the client sees them."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from drumline.client.stream import Delta


class Receiver(Protocol):
    """Who takes the outputs of one request; a `Stream` does."""

    @property
    def rid(self) -> str: ...

    @property
    def engine_index(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    def push(self, delta: Delta) -> None:
        """Take what the engine said; with a finished reason it is the last."""

    def fail(self, reason: str) -> None:
        """Hear that the engine is gone."""


R = TypeVar("R", bound=Receiver)
Into = Callable[[str, int, Callable[[Any], None]], R]
"""Makes one of an id, the engine's index, and what is called once nobody waits any more."""
