"""What is kept away from compilers, and what random input does to them."""

import json
import random
import time

import pytest

from drumline.contract.grammar import Compiling, GrammarFailure, GrammarKey, GrammarKind
from drumline.core.config import GrammarConfig
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.compiler import GrammarCache
from drumline.grammar.prepare import prepared
from drumline.replay.clock import ManualClock


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("json_schema", '{"type": "' + "x" * 70_000 + '"}', "65536 are allowed"),
        ("json_schema", '{"items":' * 100 + "{}" + "}" * 100, "nested more than 64 levels"),
        ("json_schema", "[" * 60_000, "nested more than 64 levels"),
        ("structural_tag", "[" * 60_000, "nested more than 64 levels"),
        ("json_schema", "nonsense", "it is no JSON"),
        ("regex", "a" * 5_000, "4096 are allowed"),
        ("regex", "(" * 100 + "a" + ")" * 100, "nested more than 64 levels"),
        ("regex", "(a{1000}){1000}", "repeats its parts"),
        ("regex", "a{99999999999999999999}", "repeats too often"),
        ("regex", r"(a)\1", "refers back"),
        ("regex", "a(?!b)", "lookahead"),
        ("regex", "(?<=a)b", "lookbehind"),
        ("ebnf", "root ::= " + "(" * 100 + '"a"' + ")" * 100, "nested more than 64 levels"),
        ("ebnf", "".join(f'r{n} ::= "a"\n' for n in range(2000)), "2000 rules"),
        ("choice", json.dumps([str(n) for n in range(5000)]), "5000 choices"),
        ("choice", "[]", "at least one string"),
        ("choice", '["a", 3]', "at least one string"),
        ("regex", "\ud800", "unpaired surrogate"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_compiled(kind, source, said):
    began = time.process_time()
    with pytest.raises(RefusedGrammarError, match=said):
        prepared(GrammarKey(GrammarKind(kind), source))
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "pattern", ["[(]" * 500, r"\(" * 500, "(a{3}|b){10}", "a{2,5}b{,3}", "{", "x{a}"]
)
def test_what_only_looks_like_much_passes(pattern):
    assert prepared(GrammarKey(GrammarKind.REGEX, pattern)).source == pattern


WORDS = [
    "type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref",
    "minimum", "maxLength", "pattern", "format", "additionalProperties", "prefixItems", "minItems",
    "maxItems", "not", "maxProperties", "$defs", "if",
]  # fmt: skip
VALUES = [
    "string", "object", "array", "integer", "#", "#/$defs/a", "a", "[a-", "date", "(", 0, -1, 3.5,
    True, False, None, 1 << 70, "\x00", "\U0001f600",
]  # fmt: skip


def random_schema(draw, depth=0):
    if depth > 5 or draw.random() < 0.3:
        return draw.choice(VALUES)
    if draw.random() < 0.3:
        return [random_schema(draw, depth + 1) for _ in range(draw.randrange(4))]
    words = draw.sample(WORDS, draw.randrange(5))
    schema = {word: random_schema(draw, depth + 1) for word in words}
    if draw.random() < 0.5:
        schema["type"] = draw.choice(VALUES[:4])
    return schema


def random_regex(draw):
    return "".join(draw.choice('ab(|)[]{}*+?.^$\\-,019é"') for _ in range(draw.randrange(30)))


def test_random_grammars_end_in_bounds_and_leave_no_process(vocabulary):
    """Each is compiled, refused or given up; the time allowed is that of one that hangs."""
    draw = random.Random(11)
    keys = {
        GrammarKey(kind, source)
        for _ in range(400)
        for kind, source in (
            (GrammarKind.JSON_SCHEMA, json.dumps(random_schema(draw))),
            (GrammarKind.REGEX, random_regex(draw)),
            (GrammarKind.EBNF, "root ::= " + random_regex(draw)),
        )
    }
    config = GrammarConfig(grammar_compile_timeout=5.0, grammar_cache_size=len(keys))
    cache = GrammarCache(config, lambda: vocabulary, ManualClock())
    try:
        for key in keys:
            while (
                isinstance(state := cache.request(key), GrammarFailure)
                and "too many" in state.reason
            ):
                time.sleep(0.01)
        deadline = time.perf_counter() + 90
        while any(isinstance(cache.state(key), Compiling) for key in keys):
            assert time.perf_counter() < deadline
            time.sleep(0.05)
        states = [cache.state(key) for key in keys]
        failures = [state for state in states if isinstance(state, GrammarFailure)]
        assert all(failure.permanent for failure in failures)
        assert len(failures) < len(keys)
    finally:
        workers = cache.workers
        cache.close()
    assert len(workers) == 1
