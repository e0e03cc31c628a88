"""Calls of tools that an answer is made to make: what is drawn parses, and its arguments fit."""

import json
import re

import jsonschema
import numpy as np
import pytest

from drumline.client.tool_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    CallFormat,
    Forced,
    Tool,
    call_grammar,
)
from drumline.client.tool_calls import DEEPSEEK_SEPARATOR as SEP
from drumline.contract.grammar import GrammarKey, GrammarKind
from drumline.core.errors import RequestError
from drumline.grammar.prepare import prepared

from .conftest import EOS
from .walks import Walker

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 10},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["city"],
        "$defs": {"place": {"enum": ["north", "south"]}},
    },
)
STOP = Tool("stop")
TOOLS = [WEATHER, STOP]
SCHEMAS = {tool.name: tool.parameters or {"type": "object", "maxProperties": 0} for tool in TOOLS}


def read_hermes(text):
    calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
    assert "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls) == text
    return [json.loads(call) for call in calls]


def read_deepseek(text):
    begin, end = DEEPSEEK_BEGIN + DEEPSEEK_CALL, DEEPSEEK_CALL_END + DEEPSEEK_END
    assert text.startswith(begin)
    assert text.endswith(end)
    calls = text.removeprefix(begin).removesuffix(end)
    found = []
    for call in calls.split(f"{DEEPSEEK_CALL_END}\n{DEEPSEEK_CALL}"):
        name, _, arguments = call.removeprefix(f"function{SEP}").partition("\n```json\n")
        found.append({"name": name, "arguments": json.loads(arguments.removesuffix("\n```"))})
    return found


def read_named(text):
    _, *calls = text.split("[TOOL_CALLS]")
    found = [call.split("[ARGS]", 1) for call in calls]
    return [{"name": name, "arguments": json.loads(said)} for name, said in found]


READ = {
    CallFormat.MISTRAL_ARGS: (read_named, "arguments"),
    CallFormat.MISTRAL: (lambda text: json.loads(text.removeprefix("[TOOL_CALLS]")), "arguments"),
    CallFormat.QWEN_XML: (read_hermes, "arguments"),
    CallFormat.DEEPSEEK: (read_deepseek, "arguments"),
    CallFormat.HERMES: (read_hermes, "arguments"),
    CallFormat.LLAMA_JSON: (lambda text: [json.loads(text)], "parameters"),
    CallFormat.JSON: (json.loads, "arguments"),
}


def texts(library, key, count=12):
    grammar = library.backend.compile(prepared(key))
    walker = Walker(library.vocabulary, EOS)
    found = [walker.walk(grammar, np.random.default_rng(seed)) for seed in range(count)]
    ended = [text.decode() for text, done in found if done]
    assert len(ended) >= 0.9 * count
    return ended


@pytest.mark.parametrize("format_", list(CallFormat))
@pytest.mark.parametrize("choice", [Forced.REQUIRED, "get_weather", "stop"])
def test_a_forced_call_parses_and_its_arguments_fit(library, format_, choice):
    read, member = READ[format_]
    called, most = set(), 0
    for text in texts(library, call_grammar(TOOLS, choice, format_)):
        calls = read(text)
        most = max(most, len(calls))
        assert calls
        for call in calls:
            assert call.keys() == {"name", member}
            jsonschema.validate(call[member], SCHEMAS[call["name"]])
            called.add(call["name"])
    if choice is Forced.REQUIRED:
        assert called == set(SCHEMAS)
    else:
        assert (called, most) == ({choice}, 1)


@pytest.mark.parametrize("format_", [CallFormat.HERMES, CallFormat.JSON])
def test_calls_are_several_only_where_that_is_asked(library, format_):
    read, _ = READ[format_]
    key = call_grammar(TOOLS, Forced.REQUIRED, format_, parallel=False)
    assert {len(read(text)) for text in texts(library, key)} == {1}
    grammar = library.backend.compile(prepared(call_grammar(TOOLS, Forced.REQUIRED, format_)))
    both = {
        CallFormat.HERMES: '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n' * 2,
        CallFormat.JSON: '[{"name": "stop", "arguments": {}}, {"name": "stop", "arguments": {}}]',
    }[format_]
    assert library.accepts(grammar, both.strip())


def test_text_is_free_until_a_call_begins_which_is_held_to_its_schema(library):
    key = call_grammar(TOOLS, Forced.AUTO, CallFormat.HERMES)
    grammar = library.backend.compile(prepared(key))
    call = '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'
    assert library.accepts(grammar, "No tool knows that.", masked=False)
    assert library.accepts(grammar, "Let me see. " + call % '{"city":"Oslo"}', masked=False)
    assert not library.accepts(grammar, "Let me see. " + call % '{"town":"Oslo"}', masked=False)


def test_what_cannot_be_asked_is_refused_by_its_name():
    with pytest.raises(RequestError, match="names 'fly', which is none of tools"):
        call_grammar(TOOLS, "fly", CallFormat.HERMES)
    with pytest.raises(RequestError, match="tools is empty"):
        call_grammar([], Forced.REQUIRED, CallFormat.HERMES)
    with pytest.raises(RequestError, match="'auto' cannot be held"):
        call_grammar(TOOLS, Forced.AUTO, CallFormat.JSON)


@pytest.mark.parametrize("format_", list(CallFormat))
def test_a_forced_call_may_come_behind_free_text_that_ends_at_its_first_end(library, format_):
    held = json.loads(call_grammar([STOP], "stop", format_).source)["format"]
    free = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>\n\n"}
    tag = json.dumps({"format": {"type": "sequence", "elements": [free, held]}})
    grammar = library.backend.compile(prepared(GrammarKey(GrammarKind.STRUCTURAL_TAG, tag)))
    call = {
        CallFormat.HERMES: '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        CallFormat.LLAMA_JSON: '{"name": "stop", "parameters": {}}',
        CallFormat.JSON: '[{"name": "stop", "arguments": {}}]',
        CallFormat.MISTRAL: '[TOOL_CALLS][{"name": "stop", "arguments": {}}]',
        CallFormat.MISTRAL_ARGS: "[TOOL_CALLS]stop[ARGS]{}",
        CallFormat.QWEN_XML: '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        CallFormat.DEEPSEEK: f"{DEEPSEEK_BEGIN}{DEEPSEEK_CALL}function{SEP}stop\n```json\n{{}}\n"
        f"```{DEEPSEEK_CALL_END}{DEEPSEEK_END}",
    }[format_]
    assert library.accepts(grammar, f"Hm. < {{x}}\n</think>\n\n{call}", masked=False)
    assert not library.accepts(grammar, f"Hm.</think>\n\nNo. {call}", masked=False)
    assert not library.accepts(grammar, call, masked=False)


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"type": "regex", "pattern": r"[0-9]{3}/[a-z]+"}, "555/ab", "55/ab"),
        (
            {"type": "grammar", "grammar": 'root ::= "yes" | "no" more\nmore ::= "!" more | "."'},
            "no!!.",
            "no",
        ),
        (
            {"type": "or", "elements": [{"type": "const_string", "value": v} for v in ("a", "bc")]},
            "bc",
            "b",
        ),
    ],
)
def test_other_forms_stand_behind_free_text_too(library, form, right, wrong):
    free = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>\n\n"}
    tag = {"format": {"type": "sequence", "elements": [free, form]}}
    key = GrammarKey(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))
    grammar = library.backend.compile(prepared(key))
    assert library.accepts(grammar, f"Hm. < {{x}}\n</think>\n\n{right}", masked=False)
    assert not library.accepts(grammar, f"Hm.</think>\n\n{wrong}", masked=False)
    assert not library.accepts(grammar, f"Hm.</think>\n\nNo. {right}", masked=False)
