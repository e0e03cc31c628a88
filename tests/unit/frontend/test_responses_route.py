"""POST /v1/responses, read by OpenAI's official client, from a scripted engine."""

import json
from contextlib import asynccontextmanager

import pytest
from openai import AsyncOpenAI, BadRequestError
from tests.fakes.http import run, served
from tests.unit.frontend.test_tool_calls_route import CALLS, THINKS

from drumline.core.config import ChatConfig

TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    },
    {"type": "function", "name": "stop", "parameters": {"type": "object"}, "strict": False},
]


@asynccontextmanager
async def talking(embedded, says, template=THINKS, **options):
    chat = ChatConfig(chat_template=template)
    async with (
        served(embedded, says=says, chat=chat, **options) as it,
        AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as client,
    ):

        async def ask(**changes):
            asked = {"model": "tiny", "input": "How is it in Oslo?"} | changes
            return await client.responses.create(**asked)

        it.ask, it.client = ask, client
        yield it


def prompt_of(it, embedded):
    return b"".join(map(embedded.piece, it.fake.requests[-1].input_ids)).decode()


@run
async def test_an_answer_has_the_published_shape(embedded):
    async with talking(embedded, "Hello there!", cached_tokens=4) as it:
        response = await it.ask(
            instructions="Be brief.", metadata={"a": "b"}, store=True, max_output_tokens=99
        )
        assert prompt_of(it, embedded) == "<system>Be brief.<user>How is it in Oslo?<assistant>"
        assert response.output_text == "Hello there!"
        assert (response.status, response.store, response.metadata) == (
            "completed",
            False,
            {"a": "b"},
        )
        usage = response.usage
        assert usage.input_tokens_details.cached_tokens == 4
        assert (usage.output_tokens, usage.total_tokens) == (3, usage.input_tokens + 3)
        assert it.fake.requests[0].sampling_params.max_new_tokens == 99


@run
async def test_an_answer_says_of_which_weights_it_is_streamed_and_not(embedded):
    async with talking(embedded, "Hello there!") as it:
        it.service.engine.weight_version = "step-8"
        assert (await it.ask()).weight_version == "step-8"
        *others, last = [event async for event in await it.ask(stream=True)]
        assert (last.type, last.response.weight_version) == ("response.completed", "step-8")
        begun = [event.response for event in others if hasattr(event, "response")]
        assert len(begun) == 2
        assert not any(hasattr(response, "weight_version") for response in begun)


@run
async def test_a_stream_has_the_events_that_the_client_puts_together(embedded):
    async with talking(embedded, f"<think>\nHm.\n</think>\n\n{CALLS}") as it:
        events = [event async for event in await it.ask(stream=True, tools=TOOLS)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        once = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
        call = [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]

        def text(name):
            return [
                "output_item.added",
                "content_part.added",
                f"{name}.delta",
                f"{name}.done",
                "content_part.done",
                "output_item.done",
            ]

        assert once == [
            "created",
            "in_progress",
            *text("reasoning_text"),
            *text("output_text"),
            *call,
            *call,
            "completed",
        ]
        response = events[-1].response
        assert [item.type for item in response.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        said = "".join(event.delta for event in events if event.type.endswith("output_text.delta"))
        assert said == response.output_text == "Let me see.\n"
        weather = response.output[2]
        assert json.loads(weather.arguments) == {"city": "Oslø"}
        done = [event for event in events if event.type == "response.output_item.done"]
        assert [event.item.id for event in done] == [item.id for item in response.output]


@run
async def test_the_clients_own_stream_reads_it(embedded):
    async with (
        talking(embedded, "Hello there!") as it,
        it.client.responses.stream(model="tiny", input="Hi") as stream,
    ):
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_text == "Hello there!"


@run
async def test_a_conversation_goes_on_with_what_its_tools_said(embedded):
    async with talking(embedded, f"<think>Hm.</think>{CALLS}") as it:
        response = await it.ask(tools=TOOLS)
        calls = [item for item in response.output if item.type == "function_call"]
        items = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            *(item.model_dump(exclude_none=True) for item in response.output),
            *(
                {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
                for call in calls
            ),
        ]
        await it.ask(tools=TOOLS, input=items)
        assert prompt_of(it, embedded) == (
            "[get_weather][stop]<system>Be brief.<user>Hi<assistant>Let me see.\n"
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslø"}}</tool_call>'
            '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
            "<tool>fine<tool>fine<assistant>"
        )


@run
async def test_an_answer_that_is_cut_off_is_incomplete(embedded):
    async with talking(embedded, "one two three four") as it:
        response = await it.ask(max_output_tokens=2)
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        *_, last = [event async for event in await it.ask(max_output_tokens=2, stream=True)]
        assert last.type == "response.incomplete"


@run
async def test_what_an_answer_is_held_to_reaches_the_engine(embedded):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    async with talking(embedded, '{"a": 1}') as it:
        await it.ask(text={"format": form})
        assert json.loads(it.fake.requests[-1].sampling_params.json_schema) == schema
        await it.ask(tools=TOOLS, tool_choice={"type": "function", "name": "stop"})
        assert it.fake.requests[-1].sampling_params.structural_tag.count('"begin"') == 1


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"extra_body": {"text": {"format": {"type": "json_schema"}}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"extra_body": {"conversation": "conv_1"}}, "conversation"),
    ],
)  # fmt: skip
@run
async def test_what_cannot_be_had_is_refused_by_name(embedded, wrong, param):
    async with talking(embedded, "Hello") as it:
        with pytest.raises(BadRequestError) as caught:
            await it.ask(**wrong)
        assert caught.value.param == param
