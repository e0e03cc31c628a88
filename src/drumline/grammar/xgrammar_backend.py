"""The xgrammar library behind our protocols.

Importing this module imports xgrammar, which loads torch and transformers: it is
done by whoever compiles a first grammar, and by nobody else.
"""

import json
import re
from collections.abc import Sequence

import xgrammar

from drumline.contract.arrays import IntArray
from drumline.contract.grammar import GrammarFaultError, GrammarKind
from drumline.grammar.any_object import ANY_OBJECT
from drumline.grammar.blanks import BlankRun, Blanks
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.prepare import ANY_OBJECT_SCHEMA, Prepared
from drumline.grammar.structures import of_structures
from drumline.grammar.vocabulary import Vocabulary

_PLACE = re.compile(r"^\[[^\]]*\] \S+\.(?:cc|h):\d+: (?:Check failed: \(.*?\) is false: )?")
"""What the library puts before a message: the time, a place in its source, what it checked."""
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")


class XgrammarBackend:
    """Compiles with xgrammar. Thread: any; compiling lets other threads run."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._plain = _compiler(vocabulary.pieces, vocabulary.stop_ids)
        # The library's strings of bounded length let raw control characters through, which
        # JSON forbids. Line ends stay, as white space: those it keeps out of strings.
        texts = tuple(b"" if _CONTROL.search(piece) else piece for piece in vocabulary.pieces)
        self._json = _compiler(texts, vocabulary.stop_ids)
        self._stop_ids = vocabulary.stop_ids
        self._blanks = Blanks(vocabulary)

    def compile(self, prepared: Prepared) -> "XgrammarGrammar":
        """Return the compiled grammar. Raises RefusedGrammarError for one that never compiles."""
        blanks = self._blanks if prepared.kind.holds_json else None
        try:
            return XgrammarGrammar(self._compiled(prepared), self._stop_ids, blanks)
        except (RuntimeError, ValueError, TypeError) as error:
            raise RefusedGrammarError(_PLACE.sub("", str(error)).strip()) from None

    def _compiled(self, prepared: Prepared) -> xgrammar.CompiledGrammar:
        plain, source = self._plain, prepared.source
        match prepared.kind:
            case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
                # What is closed is written into the schema; see the schema module.
                if source == ANY_OBJECT_SCHEMA:
                    return self._json.compile_grammar(ANY_OBJECT)
                return self._json.compile_json_schema(source, strict_mode=False)
            case GrammarKind.REGEX:
                return plain.compile_regex(source)
            case GrammarKind.EBNF:
                return plain.compile_grammar(source)
            case GrammarKind.CHOICE:
                return plain.compile_grammar(_choice_rule(json.loads(source)))
            case GrammarKind.STRUCTURAL_TAG:
                return self._compiled_tag(json.loads(source))

    def _compiled_tag(self, tag: dict[str, object]) -> xgrammar.CompiledGrammar:
        if not isinstance(tag, dict):
            raise RefusedGrammarError("a structural tag is a JSON object")
        told = tag if "format" in tag else {"format": of_structures(tag)}
        return self._json.compile_structural_tag({"type": "structural_tag", **told})


class XgrammarGrammar:
    """A compiled grammar. Thread: any."""

    __slots__ = ("_blanks", "_compiled", "_stop_ids")

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        stop_ids: tuple[int, ...],
        blanks: Blanks | None,
    ) -> None:
        self._compiled = compiled
        self._stop_ids = stop_ids
        self._blanks = blanks

    def matcher(self) -> "XgrammarMatcher":
        """Return a matcher that stands at the beginning."""
        run = None if self._blanks is None else BlankRun(self._blanks)
        return XgrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._stop_ids, run)


class XgrammarMatcher:
    """Implements `contract.grammar.Matcher`."""

    __slots__ = ("_matcher", "_run", "stop_ids", "terminated")

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        stop_ids: tuple[int, ...],
        run: BlankRun | None,
    ) -> None:
        self._matcher = matcher
        self._run = run
        self.stop_ids = stop_ids
        self.terminated = False

    def fill(self, masks: IntArray, row: int) -> None:
        """Write which ids may come next to a row of `masks`."""
        try:
            written = self._matcher.fill_next_token_bitmask(masks, row)
        except RuntimeError as error:
            raise GrammarFaultError(_PLACE.sub("", str(error)).strip()) from None
        if not written:
            # The library leaves a row that allows all ids as it is.
            masks[row].fill(-1)
        if self._run is not None:
            self._run.cut(masks, row)

    def accept(self, token: int) -> bool:
        """Take a token; False if it does not fit here, which changes nothing."""
        # One that has ended takes nothing, by itself.
        taken = bool(self._matcher.accept_token(token))
        if taken:
            self.terminated = token in self.stop_ids
            if self._run is not None:
                self._run.accepted(token)
        return taken

    def awaited(self) -> str:
        """Return the text that must follow, as far as it is certain; nothing once it ended."""
        return "" if self.terminated else str(self._matcher.find_jump_forward_string())

    def rollback(self, tokens: int) -> None:
        """Undo the last `tokens` accepted ones."""
        self._matcher.rollback(tokens)
        self.terminated = self.terminated and not tokens
        if self._run is not None:
            self._run.rolled_back(tokens)


def _compiler(pieces: Sequence[bytes], stop_ids: Sequence[int]) -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(
        list(pieces),
        xgrammar.VocabType.RAW,
        vocab_size=len(pieces),
        stop_token_ids=list(stop_ids),
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _choice_rule(choices: list[str]) -> str:
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
