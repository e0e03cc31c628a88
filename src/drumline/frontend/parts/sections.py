"""An answer as a row of sections, one after the other: reasoning, text, or a call.

That is how APIs speak which say where each section begins and ends. White space alone makes
no section of text.
"""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from drumline.core.ids import request_id
from drumline.frontend.parts.part import Arguments, CallBegun, Part, Reasoning, Words


class SectionKind(StrEnum):
    """What a section holds."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Section(Struct):
    """One section, as far as it has come; a call's text is that of its arguments."""

    index: int
    kind: SectionKind
    name: str = ""
    """Of the tool that is called."""
    id: str = ""
    text: str = ""


class Began(Struct, frozen=True):
    """A section begins, without text."""

    section: Section


class Grew(Struct, frozen=True):
    """A section's text grows."""

    section: Section
    text: str


class Ended(Struct, frozen=True):
    """A section is complete."""

    section: Section


SectionEvent = Began | Grew | Ended


class Sections:
    """The sections of one answer; `prefixes` are what the ids of each kind begin with."""

    def __init__(self, prefixes: dict[SectionKind, str]) -> None:
        self.sections: list[Section] = []
        self._prefixes = prefixes
        self._open: Section | None = None
        self._space = ""

    def add(self, parts: Iterable[Part]) -> list[SectionEvent]:
        """Return what the next parts of the answer do to its sections."""
        events: list[SectionEvent] = []
        for part in parts:
            match part:
                case Words(text):
                    self._text(events, text)
                case Reasoning(text):
                    self._grow(events, SectionKind.REASONING, text)
                case CallBegun(_, name):
                    self._begin(events, SectionKind.CALL, name)
                case Arguments(_, text):
                    self._grow(events, SectionKind.CALL, text)
        return events

    def finish(self) -> list[SectionEvent]:
        """Return the end of the last section; nothing comes after it."""
        events: list[SectionEvent] = []
        self._end(events)
        return events

    def _text(self, events: list[SectionEvent], text: str) -> None:
        if self._open is None or self._open.kind is not SectionKind.TEXT:
            text = self._space + text
            if not text.strip():
                self._space = text
                return
        self._space = ""
        self._grow(events, SectionKind.TEXT, text)

    def _grow(self, events: list[SectionEvent], kind: SectionKind, text: str) -> None:
        section = self._open
        if section is None or section.kind is not kind:
            section = self._begin(events, kind)
        section.text += text
        events.append(Grew(section, text))

    def _begin(self, events: list[SectionEvent], kind: SectionKind, name: str = "") -> Section:
        self._end(events)
        self._space = ""
        section = Section(len(self.sections), kind, name, request_id(self._prefixes[kind]))
        self.sections.append(section)
        self._open = section
        events.append(Began(section))
        return section

    def _end(self, events: list[SectionEvent]) -> None:
        if self._open is not None:
            events.append(Ended(self._open))
            self._open = None
