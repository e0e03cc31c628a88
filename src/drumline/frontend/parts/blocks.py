"""An answer as a row of blocks, one after the other: reasoning, text, or a call.

That is how APIs speak which say where each block begins and ends. White space alone makes
no block of text.
"""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from drumline.core.ids import request_id
from drumline.frontend.parts.part import Arguments, CallBegun, Part, Reasoning, Words


class BlockKind(StrEnum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Block(Struct):
    """One block, as far as it has come; a call's text is that of its arguments."""

    index: int
    kind: BlockKind
    name: str = ""
    """Of the tool that is called."""
    id: str = ""
    text: str = ""


class Began(Struct, frozen=True):
    """A block begins, without text."""

    block: Block


class Grew(Struct, frozen=True):
    """A block's text grows."""

    block: Block
    text: str


class Ended(Struct, frozen=True):
    """A block is complete."""

    block: Block


BlockEvent = Began | Grew | Ended


class Blocks:
    """The blocks of one answer; `prefixes` are what the ids of each kind begin with."""

    def __init__(self, prefixes: dict[BlockKind, str]) -> None:
        self.blocks: list[Block] = []
        self._prefixes = prefixes
        self._open: Block | None = None
        self._space = ""

    def add(self, parts: Iterable[Part]) -> list[BlockEvent]:
        """Return what the next parts of the answer do to its blocks."""
        events: list[BlockEvent] = []
        for part in parts:
            match part:
                case Words(text):
                    self._text(events, text)
                case Reasoning(text):
                    self._grow(events, BlockKind.REASONING, text)
                case CallBegun(_, name):
                    self._begin(events, BlockKind.CALL, name)
                case Arguments(_, text):
                    self._grow(events, BlockKind.CALL, text)
        return events

    def finish(self) -> list[BlockEvent]:
        """Return the end of the last block; nothing comes after it."""
        events: list[BlockEvent] = []
        self._end(events)
        return events

    def _text(self, events: list[BlockEvent], text: str) -> None:
        if self._open is None or self._open.kind is not BlockKind.TEXT:
            text = self._space + text
            if not text.strip():
                self._space = text
                return
        self._space = ""
        self._grow(events, BlockKind.TEXT, text)

    def _grow(self, events: list[BlockEvent], kind: BlockKind, text: str) -> None:
        block = self._open
        if block is None or block.kind is not kind:
            block = self._begin(events, kind)
        block.text += text
        events.append(Grew(block, text))

    def _begin(self, events: list[BlockEvent], kind: BlockKind, name: str = "") -> Block:
        self._end(events)
        self._space = ""
        block = Block(len(self.blocks), kind, name, request_id(self._prefixes[kind]))
        self.blocks.append(block)
        self._open = block
        events.append(Began(block))
        return block

    def _end(self, events: list[BlockEvent]) -> None:
        if self._open is not None:
            events.append(Ended(self._open))
            self._open = None
