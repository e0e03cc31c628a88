"""Reading text that comes in pieces, by small steps."""

from typing import Protocol

from drumline.frontend.parts.part import Part


class Stepping(Protocol):
    """A reader that holds back what it cannot tell yet."""

    @property
    def standing(self) -> tuple[int, int]:
        """Its state, and how many characters it holds."""

    def step(self, parts: list[Part]) -> None:
        """Take of what is held as much as its state can; add the parts that this completes."""


def stepped(reader: Stepping) -> list[Part]:
    """Return the parts that a reader completes until a step changes nothing."""
    parts: list[Part] = []
    standing = reader.standing
    while standing[1]:
        reader.step(parts)
        before, standing = standing, reader.standing
        if standing == before:
            break
    return parts
