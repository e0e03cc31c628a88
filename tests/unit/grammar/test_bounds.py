"""What is kept away from compilers."""

import json
import time

import pytest

from drumline.contract.grammar import GrammarKey, GrammarKind
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.prepare import prepared


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
        ("regex", r"[a\1]", "refers back"),
        ("regex", r"\p{L}", "uses .*p, which is not"),
        ("regex", r"[\P{L}]", "uses .*P, which is not"),
        ("regex", "a^b", "anywhere but at the beginning"),
        ("regex", "a(b|^c)", "anywhere but at the beginning"),
        ("regex", "a$b", "anywhere but at the end"),
        ("regex", "(a|b$)c", "anywhere but at the end"),
        ("regex", "(^a)*", "a repeat of what holds"),
        ("regex", "($){3}", "a repeat of what holds"),
        ("regex", "(a*)*", "a repeat without end of what may be empty"),
        ("regex", "(b(c|)?|)+", "a repeat without end of what may be empty"),
        ("regex", "(()){2,}", "a repeat without end of what may be empty"),
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
    "pattern",
    [
        "[(]" * 500,
        r"\(" * 500,
        "(a{3}|b){10}",
        "a{2,5}b{,3}",
        "{",
        "x{a}",
        "^(a|b)$",
        "^a$|^b$",
        "(^a|b)(c|d$)",
        "(a*b)*",
        "(a?){3}",
        "(a|b?c)+",
        "x(a*)?",
    ],
)
def test_what_only_looks_like_much_passes(pattern):
    assert prepared(GrammarKey(GrammarKind.REGEX, pattern)).source == pattern
