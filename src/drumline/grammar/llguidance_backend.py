"""The llguidance library behind our protocols.

It has no compile step: an automaton grows while tokens are matched, within limits of
its own. A matcher that met one stays in an error, which is told as a fault.
"""

import json

import llguidance
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from drumline.contract.arrays import IntArray
from drumline.contract.grammar import GrammarFaultError, GrammarKind
from drumline.grammar.blanks import BlankRun, Blanks
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.prepare import Prepared
from drumline.grammar.tags import lark_of
from drumline.grammar.vocabulary import Vocabulary
from drumline.grammar.white_space import check_white_space

_NOTHING_FITS = "NoExtensionBias"
"""What the library's error begins with where no id of the vocabulary may come next."""


class LlguidanceBackend:
    """Makes grammars for llguidance. Thread: any."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = LLTokenizer(
            llguidance.TokenizerWrapper(_Pieces(vocabulary)),
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.stop_ids),
        )
        self._stop_ids = vocabulary.stop_ids
        self._blanks = Blanks(vocabulary)

    def compile(self, prepared: Prepared) -> "LlguidanceGrammar":
        """Return the checked grammar. Raises RefusedGrammarError for one that is none."""
        try:
            written = _written(prepared)
        except RefusedGrammarError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise RefusedGrammarError(str(error)) from None
        first = LLMatcher(self._tokenizer, written, log_level=0)
        if first.is_error():
            raise RefusedGrammarError(first.get_error())
        blanks = self._blanks if prepared.kind.holds_json else None
        return LlguidanceGrammar(first, self._stop_ids, self._tokenizer.vocab_size, blanks)


class LlguidanceGrammar:
    """A grammar that was checked. Thread: any."""

    __slots__ = ("_blanks", "_first", "_size", "_stop_ids")

    def __init__(
        self, first: LLMatcher, stop_ids: tuple[int, ...], size: int, blanks: Blanks | None
    ) -> None:
        self._first = first
        self._size = size
        self._stop_ids = stop_ids
        self._blanks = blanks

    def matcher(self) -> "LlguidanceMatcher":
        """Return a matcher that stands at the beginning."""
        run = None if self._blanks is None else BlankRun(self._blanks)
        return LlguidanceMatcher(self._first.deep_copy(), self._stop_ids, self._size, run)


class LlguidanceMatcher:
    """Implements `contract.grammar.Matcher`."""

    __slots__ = ("_matcher", "_run", "_size", "_stopped", "stop_ids")

    def __init__(
        self, matcher: LLMatcher, stop_ids: tuple[int, ...], size: int, run: BlankRun | None
    ) -> None:
        self._matcher = matcher
        self._run = run
        self._size = size
        self._stopped = False
        self.stop_ids = stop_ids

    @property
    def terminated(self) -> bool:
        return self._stopped

    def fill(self, masks: IntArray, row: int) -> None:
        """Write which ids may come next to a row of `masks`."""
        mask = masks[row]
        try:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except ValueError as error:
            raise GrammarFaultError(str(error)) from None
        if self._matcher.is_error():
            why = self._matcher.get_error()
            if not why.startswith(_NOTHING_FITS):
                raise GrammarFaultError(why)
            mask.fill(0)
        if self._run is not None:
            self._run.cut(masks, row)

    def accept(self, token: int) -> bool:
        """Take a token; False if it does not fit here, which changes nothing."""
        if self._stopped or not 0 <= token < self._size:
            return False
        if token in self.stop_ids:
            taken = self._stopped = bool(self._matcher.is_accepting())
        else:
            # A token that does not fit would leave the matcher in an error for good.
            fits = self._matcher.validate_tokens([token]) == 1
            taken = fits and bool(self._matcher.consume_token(token))
        if taken and self._run is not None:
            self._run.accepted(token)
        return taken

    def awaited(self) -> str:
        """Return the text that must follow, as far as it is certain; nothing once it ended."""
        return "" if self._stopped else self._matcher.compute_ff_bytes().decode(errors="replace")

    def rollback(self, tokens: int) -> None:
        """Undo the last `tokens` accepted ones."""
        if self._run is not None:
            self._run.rolled_back(tokens)
        if tokens and self._stopped:
            # The end is known here alone: to the library it is no token.
            self._stopped = False
            tokens -= 1
        if tokens:
            self._matcher.rollback(tokens)


class _Pieces:
    """The vocabulary as the library asks for it.

    It tokenizes what a grammar leaves no choice about, the longest piece first: any
    tokenizing is right, and this one needs no tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.stop_ids[0]
        self.bos_token_id = None
        self.tokens = list(vocabulary.pieces)
        self.special_token_ids = [id_ for id_, piece in enumerate(vocabulary.pieces) if not piece]
        self._ids = {piece: id_ for id_, piece in enumerate(vocabulary.pieces) if piece}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            for width in range(min(self._longest, len(text) - place), 0, -1):
                found = self._ids.get(text[place : place + width])
                if found is not None:
                    ids.append(found)
                    break
            else:
                break  # what stands behind a byte that no id spells does not follow what is before
            place += width
        return ids


def _written(prepared: Prepared) -> str:
    source = prepared.source
    written: str
    match prepared.kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
            check_white_space(json.loads(source))
            written = LLMatcher.grammar_from_json_schema(source)
        case GrammarKind.REGEX:
            written = LLMatcher.grammar_from_regex(source)
        case GrammarKind.EBNF:
            written = LLMatcher.grammar_from_lark(gbnf_to_lark(source))
        case GrammarKind.CHOICE:
            options = " | ".join(json.dumps(choice) for choice in json.loads(source))
            written = LLMatcher.grammar_from_lark(f"start: {options}")
        case GrammarKind.STRUCTURAL_TAG:
            written = LLMatcher.grammar_from_lark(lark_of(json.loads(source)))
    return written
