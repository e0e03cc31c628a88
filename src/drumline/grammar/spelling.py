"""Whether a vocabulary can spell what a grammar asks for.

A vocabulary in which every byte of a text is an id spells everything. Many have gaps: bytes
that their texts never held, or letters where there are no bytes. A grammar that asks for what
lies in a gap could only end in a request that cannot go on, so it is told from the start.
"""

import json

import numpy as np

from drumline.contract.grammar import Grammar, GrammarFaultError, GrammarKind, Matcher
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.prepare import Prepared
from drumline.grammar.vocabulary import Vocabulary

MAX_PLACES = 64
"""Places of a grammar that are looked at for a way to its end."""
MANY = 64
"""Ids that may come next, from which on there is taken to be a way."""
_SHOWN = 60

_BYTES_OF_TEXT = (*range(0xC0), *range(0xC2, 0xF5))
"""The bytes that may be in UTF-8."""


class Spelling:
    """One vocabulary, and what it spells. Thread: one at a time."""

    __slots__ = ("_longest", "_masks", "_pieces", "_vocabulary", "complete")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._pieces = frozenset(vocabulary.pieces) - {b""}
        self._longest = max(map(len, self._pieces), default=0)
        self._masks = np.zeros((1, vocabulary.mask_words), np.int32)
        self.complete = all(bytes((each,)) in self._pieces for each in _BYTES_OF_TEXT)
        """Whether each byte is an id of its own, so that there is nothing to look for."""

    def check(self, prepared: Prepared, grammar: Grammar) -> None:
        """Raise RefusedGrammarError for a grammar of which it can be seen that no answer fits.

        Of choices each must be spelled.
        """
        if self.complete:
            return
        if prepared.kind is GrammarKind.CHOICE:
            for choice in json.loads(prepared.source):
                if not self._spells(choice.encode()):
                    raise _refused(f"the choice {_shown(choice)}")
            return
        end = self._dead_end(grammar)
        if end is not None:
            before, awaited = end
            what = _shown(awaited) if awaited else "what the grammar asks for"
            where = f" behind {_shown(before)}" if before else ", with which it begins"
            raise _refused(f"{what}{where}")

    def _spells(self, text: bytes) -> bool:
        """Whether a text is a row of pieces."""
        reached = {0}
        for end in range(1, len(text) + 1):
            starts = range(max(0, end - self._longest), end)
            if any(start in reached and text[start:end] in self._pieces for start in starts):
                reached.add(end)
        return len(text) in reached

    def _dead_end(self, grammar: Grammar) -> tuple[str, str] | None:
        """Return the text before the farthest dead end, and what should follow; None if
        a way leads to the grammar's end, or may do so."""
        ways, farthest = [self._ways(grammar.matcher())], ("", "")
        path: list[int] = []
        deepest = -1
        for _ in range(MAX_PLACES):
            here = ways[-1]
            if here is None:
                return None
            if not here and len(path) > deepest:
                deepest, farthest = len(path), self._told(grammar, path)
            while not ways[-1]:
                ways.pop()
                if not ways:
                    return farthest
                path.pop()
            path.append(ways[-1].pop())
            ways.append(self._ways(_led(grammar, path)))
        return None

    def _told(self, grammar: Grammar, path: list[int]) -> tuple[str, str]:
        before = b"".join(self._vocabulary.pieces[token] for token in path)
        return before.decode(errors="replace"), _led(grammar, path).awaited()

    def _ways(self, matcher: Matcher) -> list[int] | None:
        """Return the ids that may come next; None if it may end here, or many may."""
        try:
            matcher.fill(self._masks, 0)
        except GrammarFaultError:
            return None
        bits = np.unpackbits(self._masks.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: self._vocabulary.size])
        if len(allowed) > MANY or np.isin(allowed, matcher.stop_ids).any():
            return None
        ways: list[int] = allowed.tolist()
        return ways


def _led(grammar: Grammar, path: list[int]) -> Matcher:
    """Return a matcher behind a path. Taking tokens back would not do: some stay in a dead end."""
    matcher = grammar.matcher()
    for token in path:
        matcher.accept(token)
    return matcher


def _refused(what: str) -> RefusedGrammarError:
    return RefusedGrammarError(f"the model's vocabulary cannot spell {what}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
