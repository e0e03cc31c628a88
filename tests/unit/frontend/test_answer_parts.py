"""An answer's parts are the same however its text is cut, and no character is lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.client.tool_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    CallFormat,
)
from drumline.client.tool_calls import DEEPSEEK_SEPARATOR as SEP
from drumline.core.config import ChatConfig, ReasoningParser, ToolCallParser
from drumline.frontend.parts.form import form_of
from drumline.frontend.parts.part import Arguments, CallBegun, Reasoning, Words, joined
from drumline.frontend.parts.reader import AnswerReader, Reading

TOOLS = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "stop": None,
}
HERMES = Reading(calls=CallFormat.HERMES, tools=TOOLS)
LLAMA = Reading(calls=CallFormat.LLAMA_JSON, tools=TOOLS)
JSON = Reading(calls=CallFormat.JSON, tools=TOOLS)
MISTRAL = Reading(calls=CallFormat.MISTRAL, tools=TOOLS)
NAMED = Reading(calls=CallFormat.MISTRAL_ARGS, tools=TOOLS)
DEEPSEEK = Reading(calls=CallFormat.DEEPSEEK, tools=TOOLS)
QWEN_XML = Reading(calls=CallFormat.QWEN_XML, tools=TOOLS)
THINKS = Reading(reasons=True)
OPENED = Reading(reasons=True, opened=True)


def read(reading, deltas):
    reader = AnswerReader(reading)
    parts = [part for delta in deltas for part in reader.add(delta)]
    return joined(parts + reader.finish())


def call(number, name, arguments):
    return [CallBegun(number, name), Arguments(number, arguments)]


OSLO = '{"city": "Os\\"l}o", "near": [{"a": 1}, "]"]}'
WEATHER = f'{{"name": "get_weather", "arguments": {OSLO}}}'
TAGGED = f"<tool_call>\n{WEATHER}\n</tool_call>"


def deepseek(*calls):
    return (
        DEEPSEEK_BEGIN
        + "\n".join(f"{DEEPSEEK_CALL}{each}{DEEPSEEK_CALL_END}" for each in calls)
        + DEEPSEEK_END
    )


FENCED = f"function{SEP}get_weather\n```json\n{OSLO}\n```"
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs<l>o\n12\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
XML_ARGUMENTS = '{"city": "Os<l>o\\n12", "days": 3}'

EXPECTED = [
    (MISTRAL, f'[TOOL_CALLS] [{WEATHER}, {{"name": "stop", "arguments": {{}}}}]',
     [*call(0, "get_weather", OSLO), *call(1, "stop", "{}")]),
    (MISTRAL, f"I look.[TOOL_CALLS][{WEATHER}]",
     [Words("I look."), *call(0, "get_weather", OSLO)]),
    (NAMED, f"I look.[TOOL_CALLS]get_weather[ARGS]{OSLO}[TOOL_CALLS]stop[ARGS] {{}}\n",
     [Words("I look."), *call(0, "get_weather", OSLO), *call(1, "stop", "{}")]),
    (NAMED, f"[TOOL_CALLS]get_weather[CALL_ID]aB3xY8z01[ARGS]{OSLO} Done.",
     [*call(0, "get_weather", OSLO), Words(" Done.")]),
    (NAMED, '[TOOL_CALLS]fly[TOOL_CALLS]stop[ARGS]{"a": "cut of',
     [Words("[TOOL_CALLS]fly"), *call(0, "stop", '{"a": "cut of')]),
    (NAMED, '[TOOL_CALLS]stop[ARGS]{"a":\n "x\ty\\\\"}', call(0, "stop", '{"a":\n "x\\ty\\\\"}')),
    (HERMES, '<tool_call>{"name": "stop", "arguments": {"a":\n "x\ny"}}</tool_call>',
     call(0, "stop", '{"a":\n "x\\ny"}')),
    (HERMES, '<tool_call>{"name": "stop", "arguments": "{\\"a\\": \\"x\\ny\\"}"}</tool_call>',
     call(0, "stop", '{"a": "x\\ny"}')),
    (HERMES, '<tool_call>{"arguments": {"a": "x\x01y"}, "name": "stop"}</tool_call>',
     call(0, "stop", '{"a": "x\\u0001y"}')),
    (DEEPSEEK, deepseek(f'stop{SEP}{{"a":\n "x\r\ny"}}'),
     call(0, "stop", '{"a":\n "x\\r\\ny"}')),
    (DEEPSEEK, deepseek(FENCED, f"stop{SEP}{{}}"),
     [*call(0, "get_weather", OSLO), *call(1, "stop", "{}")]),
    (DEEPSEEK, "I look." + deepseek(f"get_weather{SEP}{OSLO}"),
     [Words("I look."), *call(0, "get_weather", OSLO)]),
    (DEEPSEEK, f"{DEEPSEEK_BEGIN}{DEEPSEEK_CALL}{FENCED}",
     call(0, "get_weather", OSLO)),
    (QWEN_XML, f"I look.\n\n{XML}\n<tool_call><function=stop></function></tool_call>\n",
     [Words("I look.\n\n"), *call(0, "get_weather", XML_ARGUMENTS), *call(1, "stop", "{}")]),
    (QWEN_XML, f"{XML} Done.", [*call(0, "get_weather", XML_ARGUMENTS), Words(" Done.")]),
    (QWEN_XML, '<tool_call>\n{"name": "stop", "arguments": {"a": 1}}\n</tool_call>',
     call(0, "stop", '{"a": 1}')),
    (QWEN_XML, "<tool_call><function=stop><parameter=a>NaN</parameter></function></tool_call>",
     call(0, "stop", '{"a": "NaN"}')),
    (HERMES, "No tool knows that.", [Words("No tool knows that.")]),
    (HERMES, TAGGED, call(0, "get_weather", OSLO)),
    (
        HERMES,
        f'Let me see.\n{TAGGED}\n<tool_call>{{"name":"stop"}}</tool_call>\n',
        [Words("Let me see.\n"), *call(0, "get_weather", OSLO), *call(1, "stop", "{}")],
    ),
    (HERMES, f"{TAGGED} Done.", [*call(0, "get_weather", OSLO), Words(" Done.")]),
    (HERMES, TAGGED.removesuffix("\n</tool_call>"), call(0, "get_weather", OSLO)),
    (
        HERMES,
        '<tool_call>{"id": 7, "arguments": {"a": [true]}, "x": null, "name": "stop"}</tool_call>',
        call(0, "stop", '{"a": [true]}'),
    ),
    (
        HERMES,
        '<tool_call>{"name": "stop", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call(0, "stop", '{"a": 1}'),
    ),
    (
        HERMES,
        '<tool_call>{"name": "stop", "arguments": {"a": "cut of',
        call(0, "stop", '{"a": "cut of'),
    ),
    (LLAMA, f"\n{WEATHER}".replace("arguments", "parameters"), call(0, "get_weather", OSLO)),
    (LLAMA, f"<|python_tag|>{WEATHER}", call(0, "get_weather", OSLO)),
    (LLAMA, f"I look. <|python_tag|>{WEATHER}",
     [Words("I look. "), *call(0, "get_weather", OSLO)]),
    (LLAMA, f'{WEATHER}; {{"name": "stop"}}',
     [*call(0, "get_weather", OSLO), *call(1, "stop", "{}")]),
    (JSON, f'[{WEATHER}, {{"name": "stop", "arguments": {{}}}}]',
     [*call(0, "get_weather", OSLO), *call(1, "stop", "{}")]),
    (JSON, WEATHER, call(0, "get_weather", OSLO)),
    (THINKS, "<think>\nHm.\n\nSo.\n</think>\n\nYes.", [Reasoning("Hm.\n\nSo."), Words("Yes.")]),
    (THINKS, "\n<think>Hm.", [Reasoning("Hm.")]),
    (THINKS, "Yes. <think>", [Words("Yes. <think>")]),
    (THINKS, "<think>\n\n</think>\n\nYes.", [Words("Yes.")]),
    (OPENED, "Hm.</think>Yes.</think>", [Reasoning("Hm."), Words("Yes.</think>")]),
    (OPENED, "<think>Hm.</think>", [Reasoning("Hm.")]),
    (OPENED, "Hm. </thi", [Reasoning("Hm. </thi")]),
]  # fmt: skip

MALFORMED = [
    (MISTRAL, '[TOOL_CALLS][{"name": "fly"}]'),
    (MISTRAL, "[TOOL_CALLS]get_weather[ARGS]{}"),
    (NAMED, "[TOOL_CALLS]fly[ARGS]{}"),
    (NAMED, "[TOOL_CALLS]stop[ARGS][1]"),
    (NAMED, "[TOOL_CALLS]stop[ARGS]"),
    (NAMED, f"[TOOL_CALLS]{'x' * 300}[ARGS]{{}}"),
    (NAMED, "[TOOL_CALLS] [TOOL_CAL"),
    (DEEPSEEK, deepseek(f'stop{SEP}{{"a": NaN}}')),
    (HERMES, '<tool_call>{"name": "stop", "arguments": "{\\"a\\": NaN}"}</tool_call>'),
    (DEEPSEEK, deepseek(f"fly{SEP}{{}}")),
    (DEEPSEEK, deepseek(f"stop{SEP}[1]")),
    (DEEPSEEK, deepseek("stop")),
    (DEEPSEEK, f"{DEEPSEEK_BEGIN} and then"),
    (DEEPSEEK, DEEPSEEK_BEGIN),
    (QWEN_XML, "<tool_call>\n<function=fly>\n</function>\n</tool_call>"),
    (QWEN_XML, "<tool_call><function=stop>loose</function></tool_call>"),
    (QWEN_XML, "<tool_call><function=stop><parameter=a>1</parameter>"),
    (QWEN_XML, '<tool_call>{"name": "stop", "arguments": {"a": NaN}}</tool_call>'),
    (QWEN_XML, "a <tool_cal"),
    (HERMES, "<tool_call>not JSON</tool_call>"),
    (HERMES, '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "stop", "arguments": [1]; }</tool_call>'),
    (HERMES, '<tool_call>{"name": "stop", "arguments": "no object"}</tool_call>'),
    (HERMES, '<tool_call>{"name" "stop"}</tool_call>'),
    (HERMES, "<tool_call>"),
    (HERMES, 'x <tool_call> {"na'),
    (HERMES, "a <tool_cal"),
    (LLAMA, '{"answer": 42}'),
    (LLAMA, "<|python_tag|>print(1)"),
    (LLAMA, "<|python"),
    (JSON, "[1, 2]"),
    (JSON, '[{"name": "fly"}]'),
    (JSON, " "),
    (THINKS, " <thi"),
]


@pytest.mark.parametrize(("reading", "text", "expected"), EXPECTED)
def test_any_split_of_the_text_has_the_same_parts(reading, text, expected):
    assert read(reading, [text]) == expected
    assert read(reading, text) == expected, "a character at a time"
    for at in range(len(text)):
        assert read(reading, [text[:at], text[at:]]) == expected


@pytest.mark.parametrize(("reading", "text"), MALFORMED)
def test_what_is_no_call_comes_out_as_words(reading, text):
    assert read(reading, [text]) == [Words(text)]
    assert read(reading, text) == [Words(text)]


def test_a_call_behind_a_malformed_one_is_found():
    text = '<tool_call>{"name": <tool_call>{"name": "stop"}</tool_call>'
    assert read(HERMES, text) == [Words('<tool_call>{"name": '), *call(0, "stop", "{}")]


def test_arguments_come_as_they_are_written():
    reader = AnswerReader(HERMES)
    assert reader.add('<tool_call>{"name": "stop", "arg') == []
    assert reader.add('uments": {"a": "x') == call(0, "stop", '{"a": "x')
    assert reader.add('y"') == [Arguments(0, 'y"')]


def test_calls_beyond_those_that_were_asked_for_are_left_out():
    one = Reading(calls=CallFormat.HERMES, tools=TOOLS, most_calls=1)
    text = f'{TAGGED}\n<tool_call>{{"name": "stop"}}</tool_call>'
    assert read(one, [text]) == call(0, "get_weather", OSLO)


def test_calls_are_found_behind_reasoning_and_not_inside_of_it():
    both = Reading(reasons=True, calls=CallFormat.HERMES, tools=TOOLS)
    text = f"<think>Perhaps {TAGGED}?</think>\n{TAGGED}"
    assert read(both, text) == [
        Reasoning(f"Perhaps {TAGGED}?"),
        *call(0, "get_weather", OSLO),
    ]


WRITTEN = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "{", "}", "[", "]",
         '"', "\\", ",", ":", ";", "\n", " ", "a", "5", "true", '"name"', '"stop"', '"arguments"',
         '{"name": "stop", "arguments": {', '{"a": [1, "b"]}', "<", "ü", "[TOOL_CALLS]",
         "[ARGS]", "stop[ARGS]{",
         DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, SEP, "stop",
         "<function=stop>", "</function>", "<parameter=a>", "</parameter>"]
    ),
    max_size=25,
).map("".join)  # fmt: skip
READINGS = st.builds(
    Reading,
    reasons=st.booleans(),
    opened=st.booleans(),
    calls=st.sampled_from([None, *CallFormat]),
    tools=st.just(TOOLS),
)


@given(WRITTEN, READINGS, st.data())
def test_any_split_of_any_text_has_the_same_parts(text, reading, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    deltas = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(reading, [text])
    assert read(reading, deltas) == whole
    assert read(reading, text) == whole
    said = "".join(part.text for part in whole if isinstance(part, Words | Reasoning))
    if not any(isinstance(part, CallBegun) for part in whole) and not reading.reasons:
        assert said == text
    for part in whole:
        if isinstance(part, CallBegun):
            assert part.name in TOOLS


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(TOOLS)),
            st.dictionaries(
                st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists), max_size=3
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(CallFormat),
    st.booleans(),
)
def test_calls_that_are_written_are_read(calls, form, ascii_only):
    member = "parameters" if form is CallFormat.LLAMA_JSON else "arguments"
    written = [
        json.dumps({"name": name, member: arguments}, ensure_ascii=ascii_only)
        for name, arguments in calls
    ]
    text = {
        CallFormat.HERMES: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written),
        CallFormat.LLAMA_JSON: ";".join(written),
        CallFormat.JSON: f"[{', '.join(written)}]",
        CallFormat.MISTRAL: f"[TOOL_CALLS][{', '.join(written)}]",
        CallFormat.MISTRAL_ARGS: "".join(
            f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls
        ),
        CallFormat.QWEN_XML: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written),
        CallFormat.DEEPSEEK: deepseek(
            *(
                f"function{SEP}{name}\n```json\n{json.dumps(arguments)}\n```"
                for name, arguments in calls
            )
        ),
    }[form]
    parts = read(Reading(calls=form, tools=TOOLS), [text])
    found = [
        (begun.name, json.loads(arguments.text))
        for begun, arguments in zip(parts[::2], parts[1::2], strict=True)
    ]
    assert found == calls


def test_a_long_call_costs_its_length_and_no_more():
    text = f'<tool_call>{{"name": "stop", "arguments": {{"a": "{"x" * 200_000}"}}}}</tool_call>'
    pieces = [text[at : at + 5] for at in range(0, len(text), 5)]
    parts = read(HERMES, pieces)
    assert len(parts[1].text) == 200_009


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ messages }}", (False, None, False)),
        ("{% if tools %}<tool_call>{% endif %}", (True, CallFormat.HERMES, False)),
        ("{{ tools }}<|python_tag|>", (True, CallFormat.LLAMA_JSON, False)),
        ("""{{ tools }}{"name": x, "parameters": y}""", (True, CallFormat.LLAMA_JSON, False)),
        ("{{ tools }}", (True, CallFormat.JSON, False)),
        ("{{ tools }}<tool_call><function=x>", (True, CallFormat.QWEN_XML, False)),
        ("{{ tools }}[TOOL_CALLS]", (True, CallFormat.MISTRAL, False)),
        ("{{ tools }}[TOOL_CALLS]x[ARGS]", (True, CallFormat.MISTRAL_ARGS, False)),
        ("{{ tools }}<|tool_calls_section_begin|>", (True, None, False)),
        (f"{{{{ tools }}}}{DEEPSEEK_BEGIN}", (True, CallFormat.DEEPSEEK, False)),
        ("{{ content.split('</think>')[-1] }}", (False, None, True)),
        (None, (False, None, False)),
    ],
)
def test_a_template_shows_how_its_model_answers(template, form):
    found = form_of(template, ChatConfig())
    assert (found.takes_tools, found.calls, found.reasons) == form


def test_the_operator_has_the_last_word_on_how_a_model_answers():
    chat = ChatConfig(
        tool_call_parser=ToolCallParser.QWEN25, reasoning_parser=ReasoningParser.THINK
    )
    found = form_of("{{ tools }}", chat)
    assert found.marks == ("<tool_call>", "</tool_call>", "<think>", "</think>")
    mistral = ChatConfig(tool_call_parser=ToolCallParser.MISTRAL)
    assert form_of("{{ tools }}", mistral).calls is CallFormat.MISTRAL
    assert form_of("{{ tools }}[ARGS]", mistral).calls is CallFormat.MISTRAL_ARGS
    none = ChatConfig(tool_call_parser=ToolCallParser.NONE, reasoning_parser=ReasoningParser.NONE)
    assert form_of("{{ tools }}<tool_call></think>", none).marks == ()
