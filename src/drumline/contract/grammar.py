"""What a constrained request names, and how tokens are matched against it.

A matcher follows one request's tokens. Whoever fills a batch's masks holds it and
knows only the Protocol; which library stands behind it is the grammar room's business.
"""

from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from drumline.contract.arrays import IntArray


class GrammarKind(StrEnum):
    """The languages a grammar may be written in."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    """Any JSON object; the source is empty."""
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"
    CHOICE = "choice"
    """One of several strings; the source is a JSON list of them."""

    @property
    def holds_json(self) -> bool:
        """Whether what matches is JSON, or text with JSON in it."""
        return self in _JSON_KINDS


_JSON_KINDS = frozenset(
    {GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT, GrammarKind.STRUCTURAL_TAG}
)


class GrammarKey(Struct, frozen=True, order=True):
    """A grammar as its client wrote it; equal keys share one compiled grammar."""

    kind: GrammarKind
    source: str = ""

    def __str__(self) -> str:
        shown = self.source if len(self.source) <= _SHOWN else self.source[:_SHOWN] + "…"
        return f"({self.kind.value}, {shown!r})"


_SHOWN = 200


class Matcher(Protocol):
    """Where one request stands in its grammar.

    Thread: one at a time. A mask has a bit for each id of the vocabulary, 32 to an int32
    word, lowest bit first; a bit that is set allows its id.
    """

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end the grammar where it may end."""

    @property
    def terminated(self) -> bool:
        """Whether a stop id was accepted. Nothing may be filled or accepted from there on."""

    def fill(self, masks: IntArray, row: int) -> None:
        """Write which ids may come next to a row of `masks`, contiguous int32 `[rows, words]`.

        Raises GrammarFaultError when the grammar cannot go on.
        """

    def accept(self, token: int) -> bool:
        """Take a token; False if it does not fit here, which changes nothing."""

    def awaited(self) -> str:
        """Return the text that must follow, as far as it is certain; nothing once it ended."""

    def rollback(self, tokens: int) -> None:
        """Undo the last `tokens` accepted ones, a stop id among them."""


class Grammar(Protocol):
    """A compiled grammar. Thread: any."""

    def matcher(self) -> Matcher:
        """Return a matcher that stands at the beginning."""


class Attachment(Struct, frozen=True):
    """A request's grammar, as the data plane learns it. Never encoded."""

    rid: str
    grammar: Grammar


class GrammarFaultError(Exception):
    """A matcher cannot go on: the grammar met a limit of its library."""


class GrammarFailure(Struct, frozen=True):
    """Why a grammar cannot be used."""

    reason: str
    permanent: bool
    """It can never be compiled: the fault is its writer's. Else this engine failed at it."""
    busy: bool = False
    """Nothing is wrong with it: too many others were in front of it."""


class Compiling(Struct, frozen=True):
    """A grammar that waits for its compile or is in it."""


GrammarState = Grammar | GrammarFailure | Compiling
