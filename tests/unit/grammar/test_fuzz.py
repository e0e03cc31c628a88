"""Random schemas, regexes and rules are refused or compile in time; nothing is left over.

Some hundred here; `make soak` takes thousands (`DRUMLINE_SOAK_GRAMMARS=5000`).
"""

import gc
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from drumline.contract.grammar import Compiling, GrammarFailure, GrammarKey, GrammarKind
from drumline.core.clock import SystemClock
from drumline.core.config import GrammarBackend, GrammarConfig
from drumline.grammar.compiler import GrammarCache
from drumline.grammar.llguidance_backend import LlguidanceMatcher
from drumline.grammar.xgrammar_backend import XgrammarMatcher

from .conftest import EOS
from .walks import Walker

GRAMMARS = int(os.environ.get("DRUMLINE_SOAK_GRAMMARS", "100"))
RESULTS = Path(__file__).parents[3] / "benchmarks/results"
TIMEOUT_S = 10.0
SLOWEST_FILL_S = 5.0
AT_A_TIME = 20
LETTERS = 'abz09 _-"\\/{}[]()|?*+.^$,:é€\n\t\x00'


class Fuzz:
    """Draws grammars of which many are right, some are odd and some are nonsense."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def key(self):
        chance = self.draw.random()
        if chance < 0.3:
            return GrammarKey(GrammarKind.REGEX, self.regex(self.draw.randrange(5)))
        if chance < 0.35:
            return GrammarKey(GrammarKind.EBNF, f"root ::= {self.regex(2)}{self.text()}")
        source = json.dumps({**self.schema(4, root=True), "title": str(self.draw.random())})
        if self.draw.random() < 0.05:
            cut = self.draw.randrange(len(source))
            source = source[:cut] + self.draw.choice(LETTERS) + source[cut + 1 :]
        return GrammarKey(GrammarKind.JSON_SCHEMA, source)

    def text(self, longest=6):
        return "".join(self.draw.choices(LETTERS, k=self.draw.randrange(longest)))

    def regex(self, depth):
        draw = self.draw
        if depth == 0:
            return draw.choice(
                ["a", "bc", ".", r"\d", r"\w", r"\s", r"\.", "[a-f]", "[^x]", "[0-9_]", "é", "€",
                 r"\p{L}", r"[\n]", "()", "", "(?:x)", "(?i:x)", "$", "^", "]", "(", "[", "(?=a)",
                 r"\1", r"\b", r"\u00e9", "😀"]
            )  # fmt: skip
        parts = [self.regex(depth - 1) for _ in range(draw.randrange(1, 4))]
        match draw.randrange(5):
            case 0:
                return "|".join(parts)
            case 1:
                return f"({'|'.join(parts)}){draw.choice(['*', '+', '?', '*?', ''])}"
            case 2:
                least = draw.choice([0, 1, 3, 50, 99_999, 1_000_000])
                most = draw.choice(["", ",", f",{least + draw.randrange(9)}", ",2"])
                return f"({parts[0]}){{{least}{most}}}"
        return "".join(parts)

    def number(self):
        return self.draw.choice([0, 1, -1, 2, 7, 100, 1.5, -0.25, 1e3, 2**53, 2**60, 1e300, -7.0])

    def value(self, depth=2):
        draw = self.draw
        simple = [None, True, False, self.number(), self.text()]
        if depth and draw.random() < 0.3:
            return draw.choice(
                [[self.value(depth - 1) for _ in range(2)], {self.text(): self.value(depth - 1)}]
            )
        return draw.choice(simple)

    def schema(self, depth, *, root=False):
        draw = self.draw
        if not root and draw.random() < 0.05:
            return draw.choice([True, False, {}, None, [], "x", 3])
        found = {}
        for _ in range(draw.randrange(1, 4)):
            found |= draw.choice(self.words(depth))()
        if root:
            found["$defs"] = {"a": self.schema(1), "b": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}
        return found

    def words(self, depth):
        draw, some = self.draw, self.draw.randrange
        simple = [
            lambda: {"type": draw.choice(["string", "integer", "number", "object", "array",
                                          "boolean", "null", ["integer", "null"], "any", 3])},
            lambda: {"enum": [self.value() for _ in range(some(4))]},
            lambda: {"const": self.value()},
            lambda: {draw.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
                                  "multipleOf"]): self.number()},
            lambda: {"type": "string", "minLength": some(5), "maxLength": some(40)},
            lambda: {"type": "string", "pattern": self.regex(some(4))},
            lambda: {"format": draw.choice(["date", "ipv4", "ipv6", "uuid", "email", "uri", "x",
                                            "time", "hostname", "duration", "json-pointer"])},
            lambda: {"$ref": draw.choice(["#", "#/$defs/a", "#/$defs/b", "#/$defs/c", "http://x"])},
            lambda: {draw.choice(["minItems", "maxProperties", "uniqueItems", "minContains"]):
                     draw.choice([0, 1, 3, True, -1, 100_001])},
        ]  # fmt: skip
        if depth == 0:
            return simple
        below = depth - 1
        return [
            *simple,
            lambda: {"type": "object",
                     "properties": {self.text(): self.schema(below) for _ in range(some(4))},
                     "required": draw.choice([[], ["a"], ["a", "b"], "a"])},
            lambda: {"properties": {draw.choice("abc"): self.schema(below) for _ in range(3)},
                     "additionalProperties": self.schema(below)},
            lambda: {"type": "array", "items": self.schema(below), "maxItems": some(6)},
            lambda: {"prefixItems": [self.schema(below) for _ in range(some(3))]},
            lambda: {draw.choice(["anyOf", "oneOf", "allOf"]):
                     [self.schema(below) for _ in range(some(4))]},
            lambda: {"patternProperties": {self.regex(1): self.schema(below)}},
            lambda: {draw.choice(["not", "contains", "propertyNames", "if", "then", "else",
                                  "unevaluatedProperties", "unevaluatedItems"]):
                     self.schema(below)},
            lambda: {draw.choice(["dependentRequired", "dependentSchemas", "dependencies"]):
                     {draw.choice("abc"): draw.choice([["b"], self.schema(below)])}},
        ]  # fmt: skip


def matchers():
    gc.collect()
    kinds = {XgrammarMatcher, LlguidanceMatcher}
    return sum(type(each) in kinds for each in gc.get_objects())


def settled(cache, keys):
    """Return what became of grammars that are compiled one after the other, each in time."""
    states = {key: cache.request(key) for key in keys}
    for key in keys:
        began = time.perf_counter()
        # Both the trial and the compile for use may take as long as the limit.
        while isinstance(states[key], Compiling):
            assert time.perf_counter() - began < 2 * TIMEOUT_S + 120, key
            time.sleep(0.001)
            states[key] = cache.state(key)
    return states


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_random_grammars_are_refused_or_compile_in_time_and_leave_nothing_behind(name, vocabulary):
    config = GrammarConfig(grammar_backend=GrammarBackend(name), grammar_compile_timeout=TIMEOUT_S)
    cache = GrammarCache(config, lambda: vocabulary, SystemClock())
    fuzz, walker, before = Fuzz(4), Walker(vocabulary, EOS), matchers()
    compiled = refused = stuck = late = 0
    try:
        for _ in range(0, GRAMMARS, AT_A_TIME):
            for key, state in settled(cache, [fuzz.key() for _ in range(AT_A_TIME)]).items():
                if isinstance(state, GrammarFailure):
                    assert state.reason
                    refused += state.permanent
                    late += not state.permanent
                    # A worker ends over what needs too much memory, and only over that.
                    told = ("within", "the process that compiled it ended")
                    assert state.permanent or any(each in state.reason for each in told), key
                    continue
                compiled += 1
                stuck += not walked(walker, state, key)
        workers = cache.workers
        assert len(workers) <= 1
    finally:
        cache.close()
    if GRAMMARS > 1000:
        RESULTS.mkdir(exist_ok=True)
        figures = {"compiled": compiled, "refused": refused, "late": late, "stuck": stuck}
        (RESULTS / f"fuzz-{name}.json").write_text(json.dumps(figures) + "\n")
    assert matchers() == before
    assert not any(psutil.pid_exists(pid) for pid in workers)
    assert compiled >= 0.1 * GRAMMARS, (compiled, refused, late)
    assert late <= 0.01 * GRAMMARS, (compiled, refused, late)
    assert stuck <= 0.05 * GRAMMARS, (compiled, stuck)


def walked(walker, grammar, key):
    """Whether some tokens follow one another; a mask that takes too long fails the test."""
    matcher, draw = grammar.matcher(), np.random.default_rng(1)
    for _ in range(12):
        began = time.thread_time()
        ids = np.flatnonzero(walker.allowed(matcher))
        assert time.thread_time() - began < SLOWEST_FILL_S, key
        # One that a library allows and then refuses ends its request, as one that is stuck.
        if not len(ids) or not matcher.accept(int(ids[draw.integers(len(ids))])):
            return False
        if matcher.terminated:
            return True
    return True
