"""Calls of tools and reasoning over HTTP, read by the official client, from a scripted engine."""

import json
from contextlib import asynccontextmanager

import pytest
from openai import AsyncOpenAI, BadRequestError
from tests.fakes.http import run, served

from drumline.core.config import ChatConfig, ToolCallParser

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKS = TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
ASK = [{"role": "user", "content": "How is it in Oslo?"}]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslø"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)


@asynccontextmanager
async def talking(embedded, says, template=TEMPLATE, parser=ToolCallParser.AUTO):
    chat = ChatConfig(chat_template=template, tool_call_parser=parser)
    async with (
        served(embedded, says=says, chat=chat) as it,
        AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as client,
    ):

        async def ask(**options):
            asked = {"model": "tiny", "messages": ASK, "tools": TOOLS} | options
            return await client.chat.completions.create(**asked)

        it.ask = ask
        it.client = client
        yield it


async def gathered(stream):
    """Return what a client puts together from a stream."""
    text, reasoning, calls, reason = "", "", {}, None
    async for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", "")
        for grown in choice.delta.tool_calls or ():
            if grown.id:
                assert grown.index == len(calls)
                calls[grown.index] = [grown.id, grown.type, grown.function.name, ""]
            calls[grown.index][3] += grown.function.arguments
        reason = choice.finish_reason or reason
    return text, reasoning, list(calls.values()), reason


def prompt_of(it, embedded):
    return b"".join(map(embedded.piece, it.fake.requests[-1].input_ids)).decode()


@pytest.mark.parametrize("stream", [False, True])
@run
async def test_calls_come_apart_from_the_text_streamed_or_not(embedded, stream):
    async with talking(embedded, CALLS) as it:
        reply = await it.ask(stream=stream)
        if stream:
            text, _, calls, reason = await gathered(reply)
            assert len({call[0] for call in calls}) == 2
        else:
            (choice,) = reply.choices
            text, reason = choice.message.content, choice.finish_reason
            calls = [
                (call.id, call.type, call.function.name, call.function.arguments)
                for call in choice.message.tool_calls
            ]
        assert (text, reason) == ("Let me see.\n", "tool_calls")
        assert [tuple(call[1:]) for call in calls] == [
            ("function", "get_weather", '{"city": "Oslø"}'),
            ("function", "stop", "{}"),
        ]
        assert all(call[0].startswith("call_") for call in calls)
        assert prompt_of(it, embedded).startswith("[get_weather][stop]<user>How")
        assert it.fake.requests[-1].sampling_params.structural_tag is None


@run
async def test_a_conversation_goes_on_with_what_its_tools_said(embedded):
    async with talking(embedded, CALLS) as it:
        (choice,) = (await it.ask()).choices
        answers = [
            {"role": "tool", "tool_call_id": call.id, "content": "fine"}
            for call in choice.message.tool_calls
        ]
        await it.ask(messages=[*ASK, choice.message.model_dump(exclude_none=True), *answers])
        assert prompt_of(it, embedded).endswith(
            '<assistant>Let me see.\n<tool_call>{"name": "get_weather", "arguments": '
            '{"city": "Oslø"}}</tool_call><tool_call>{"name": "stop", "arguments": {}}</tool_call>'
            "<tool>fine<tool>fine<assistant>"
        )


@run
async def test_parallel_calls_can_be_left_out(embedded):
    async with talking(embedded, CALLS) as it:
        (choice,) = (await it.ask(parallel_tool_calls=False)).choices
        assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather", "stop"]),
        ({"type": "function", "function": {"name": "stop"}}, ["stop"]),
    ],
)
@run
async def test_a_forced_call_is_the_engines_grammar(embedded, choice, names):
    async with talking(embedded, '<tool_call>\n{"name": "stop", "arguments": {}}\n') as it:
        (answer,) = (await it.ask(tool_choice=choice)).choices
        tag = json.loads(it.fake.requests[-1].sampling_params.structural_tag)
        begins = [one["begin"] for one in tag["format"]["tags"]]
        assert begins == [f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        with pytest.raises(BadRequestError, match="names 'fly', which is none of tools"):
            await it.ask(tool_choice={"type": "function", "function": {"name": "fly"}})


@run
async def test_a_strict_tool_holds_the_calls_that_an_answer_makes(embedded):
    strict = {"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}
    async with talking(embedded, CALLS) as it:
        await it.ask(tools=[strict, TOOLS[1]])
        tag = json.loads(it.fake.requests[-1].sampling_params.structural_tag)["format"]
        assert tag["triggers"] == ["<tool_call>"]
        schemas = [one["content"]["json_schema"] for one in tag["tags"]]
        assert schemas == [TOOLS[0]["function"]["parameters"], {"type": "object"}]


@run
async def test_with_no_tools_to_call_the_model_hears_of_none_and_text_stays_text(embedded):
    async with talking(embedded, CALLS) as it:
        (answer,) = (await it.ask(tool_choice="none")).choices
        assert (answer.message.content, answer.finish_reason) == (CALLS, "stop")
        assert prompt_of(it, embedded).startswith("<user>")


@run
async def test_a_model_without_a_format_of_its_own_is_forced_to_call_in_json(embedded):
    says = '[{"name": "stop", "arguments": {"a": 1}}]'
    async with talking(embedded, says, template="{{ messages[0].content }}") as it:
        (answer,) = (await it.ask(tool_choice="required")).choices
        assert answer.message.tool_calls[0].function.arguments == '{"a": 1}'
    other = TEMPLATE + "{# tool_calls_section_begin #}"
    async with talking(embedded, says, template=other) as it:
        with pytest.raises(BadRequestError, match="--tool-call-parser"):
            await it.ask()
    async with talking(embedded, says, template=other, parser=ToolCallParser.JSON) as it:
        (answer,) = (await it.ask()).choices
        assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@run
async def test_reasoning_comes_apart_with_calls_behind_it(embedded, stream):
    says = f"<think>\nHm. <tool_call>?\n</think>\n\n{CALLS}"
    async with talking(embedded, says, template=THINKS) as it:
        reply = await it.ask(stream=stream)
        if stream:
            text, reasoning, calls, reason = await gathered(reply)
        else:
            (choice,) = reply.choices
            text, reasoning = choice.message.content, choice.message.reasoning_content
            calls, reason = choice.message.tool_calls, choice.finish_reason
        assert (text, reasoning) == ("Let me see.\n", "Hm. <tool_call>?")
        assert (len(calls), reason) == (2, "tool_calls")


@run
async def test_reasoning_that_the_prompt_opened_is_told_apart(embedded):
    async with talking(embedded, "Hm.</think>Yes.", template=THINKS) as it:
        opened = {"chat_template_kwargs": {"enable_thinking": True}}
        (choice,) = (await it.ask(tools=[], extra_body=opened)).choices
        assert (choice.message.content, choice.message.reasoning_content) == ("Yes.", "Hm.")
        (choice,) = (await it.ask(tools=[])).choices
        assert choice.message.content == "Hm.</think>Yes."
        one = opened | {"separate_reasoning": False}
        (choice,) = (await it.ask(tools=[], extra_body=one)).choices
        assert choice.message.content == "Hm.</think>Yes."
        one = opened | {"include_reasoning": False}
        (choice,) = (await it.ask(tools=[], extra_body=one)).choices
        assert choice.message.content == "Yes."
        assert not hasattr(choice.message, "reasoning_content")


@run
async def test_an_answer_that_is_held_to_a_form_has_it_behind_reasoning_that_was_opened(embedded):
    async with talking(embedded, 'Hm.</think>\n\n{"a": 1}', template=THINKS) as it:
        opened = {"chat_template_kwargs": {"enable_thinking": True}}
        form = {"type": "json_object"}
        (choice,) = (await it.ask(tools=[], response_format=form, extra_body=opened)).choices
        assert (choice.message.content, choice.message.reasoning_content) == ('{"a": 1}', "Hm.")
        sent = it.fake.requests[-1].sampling_params
        free, held = json.loads(sent.structural_tag)["format"]["elements"]
        assert (free["begin"], free["end"]) == ("", "</think>\n\n")
        assert held == {"type": "json_schema", "json_schema": {"type": "object"}}
        assert sent.json_schema is None
        await it.ask(tool_choice="required", extra_body=opened)
        free, held = json.loads(it.fake.requests[-1].sampling_params.structural_tag)["format"][
            "elements"
        ]
        assert (free["end"], len(held["tags"])) == ("</think>\n\n", 2)


@run
async def test_an_answer_that_is_held_to_a_form_from_its_beginning_has_no_reasoning(embedded):
    async with talking(embedded, "a</think>", template=THINKS) as it:
        (choice,) = (await it.ask(tools=[], response_format={"type": "json_object"})).choices
        assert choice.message.content == "a</think>"
        assert it.fake.requests[-1].sampling_params.json_schema == '{"type":"object"}'


@run
async def test_every_form_can_stand_behind_reasoning_that_was_opened(embedded):
    async with talking(embedded, "Hm.</think>\n\nab", template=THINKS) as it:
        for asked, form in (
            ({"regex": "a.*"}, {"type": "regex", "pattern": "a.*"}),
            ({"ebnf": 'root ::= "ab"'}, {"type": "grammar", "grammar": 'root ::= "ab"'}),
            (
                {"guided_choice": ["ab", "c"], "priority": 2},
                {
                    "type": "or",
                    "elements": [{"type": "const_string", "value": v} for v in ("ab", "c")],
                },
            ),
        ):
            body = {"chat_template_kwargs": {"enable_thinking": True}} | asked
            (choice,) = (await it.ask(tools=[], extra_body=body)).choices
            assert (choice.message.content, choice.message.reasoning_content) == ("ab", "Hm.")
            sent = it.fake.requests[-1].sampling_params
            assert json.loads(sent.structural_tag)["format"]["elements"][1] == form
            assert (sent.regex, sent.ebnf) == (None, None)
            own = (sent.custom_params or {}).get("drumline", {})
            assert own == ({"priority": 2} if "priority" in asked else {})


@run
async def test_log_probabilities_of_marks_are_not_lost(embedded):
    async with talking(embedded, CALLS) as it:
        stream = await it.ask(stream=True, logprobs=True)
        entries = [
            entry
            async for chunk in stream
            for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
        ]
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == CALLS


@run
async def test_calls_in_xml_have_arguments_of_the_types_that_their_tools_declare(embedded):
    says = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    async with talking(embedded, says, template=TEMPLATE + "{# <function= #}") as it:
        (answer,) = (await it.ask()).choices
        (made,) = answer.message.tool_calls
        assert (made.function.name, made.function.arguments) == ("get_weather", '{"city": "12"}')
        assert answer.finish_reason == "tool_calls"
        stream = await it.ask(stream=True)
        grown = [
            call.function.arguments
            async for chunk in stream
            for call in (chunk.choices[0].delta.tool_calls or ())
        ]
        assert "".join(filter(None, grown)) == '{"city": "12"}'
