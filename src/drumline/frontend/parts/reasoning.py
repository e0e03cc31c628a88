"""Telling a model's reasoning from its answer: `<think>` … `</think>`, then the answer.

The white space around reasoning is layout and belongs to neither. A model whose prompt
already opened the mark goes on inside of it. What begins with anything else has no reasoning.
"""

from enum import IntEnum, auto

from drumline.frontend.parts.marks import may_begin, space_before, unsure

BEGIN = "<think>"
END = "</think>"


class _At(IntEnum):
    START = auto()
    INSIDE = auto()
    BEHIND = auto()
    """Behind the reasoning, in the white space before the answer."""
    OUTSIDE = auto()


class ReasoningReader:
    """Cuts one stream of text into reasoning and the rest."""

    __slots__ = ("_at", "_held", "_leading", "_opened")

    def __init__(self, *, opened: bool) -> None:
        """Read what follows a prompt that `opened` the mark, or did not."""
        self._at = _At.START
        self._opened = opened
        self._held = ""
        self._leading = True

    def add(self, text: str) -> tuple[str, str]:
        """Return what `text` completes: of the reasoning, and of the rest."""
        if self._at is _At.OUTSIDE:
            return "", text
        self._held += text
        if self._at is _At.START and not self._started():
            return "", ""
        reasoning = self._inside() if self._at is _At.INSIDE else ""
        rest = ""
        if self._at is _At.BEHIND:
            self._held = self._held.lstrip()
            if self._held:
                self._at = _At.OUTSIDE
        if self._at is _At.OUTSIDE:
            rest, self._held = self._held, ""
        return reasoning, rest

    def finish(self) -> tuple[str, str]:
        """Return what was held back; nothing comes after it."""
        held, self._held = self._held, ""
        if self._at is _At.INSIDE or (self._at is _At.START and self._opened):
            return self._led(held.rstrip()), ""
        return "", held if self._at is _At.START else ""

    def _started(self) -> bool:
        """Whether it is clear where the text begins; leave START if so."""
        held = self._held.lstrip()
        if not held or may_begin(held, BEGIN):
            return False
        if held.startswith(BEGIN):  # models repeat the mark that their prompt ends with
            self._held = held.removeprefix(BEGIN)
            self._at = _At.INSIDE
        else:
            self._at = _At.INSIDE if self._opened else _At.OUTSIDE
        return True

    def _inside(self) -> str:
        end = self._held.find(END)
        if end >= 0:
            found = self._led(self._held[:end].rstrip())
            self._held = self._held[end + len(END) :]
            self._at = _At.BEHIND
            return found
        sure = self._held[: len(self._held) - unsure(self._held, END)].rstrip()
        self._held = self._held[len(sure) :]
        return self._led(sure)

    def _led(self, text: str) -> str:
        """Return `text` without the white space that reasoning begins with."""
        if self._leading:
            text = text[space_before(text) :]
            self._leading = not text
        return text
