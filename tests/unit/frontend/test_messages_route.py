"""POST /v1/messages, read by Anthropic's official client, from a scripted engine."""

import asyncio
from contextlib import asynccontextmanager

import anthropic
import pytest
from anthropic import AsyncAnthropic
from tests.fakes.http import run, served
from tests.unit.frontend.test_tool_calls_route import CALLS, THINKS

from drumline.core.config import ChatConfig, ServerConfig
from drumline.frontend.service import Timings

TOOLS = [
    {
        "name": "get_weather",
        "description": "The weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"name": "stop", "input_schema": {"type": "object"}},
]
ASK = [{"role": "user", "content": "How is it in Oslo?"}]


@asynccontextmanager
async def talking(embedded, says, template=THINKS, **options):
    chat = ChatConfig(chat_template=template)
    async with (
        served(embedded, says=says, chat=chat, **options) as it,
        AsyncAnthropic(base_url=it.url, api_key="none", max_retries=0) as client,
    ):

        def asked(**changes):
            return {"model": "tiny", "max_tokens": 500, "messages": ASK} | changes

        async def ask(**changes):
            return await client.messages.create(**asked(**changes))

        it.asked, it.ask, it.client = asked, ask, client
        yield it


def prompt_of(it, embedded):
    return b"".join(map(embedded.piece, it.fake.requests[-1].input_ids)).decode()


@run
async def test_an_answer_has_the_published_shape(embedded):
    async with talking(embedded, "Hello there!", cached_tokens=4) as it:
        body = (await it.http.post("/v1/messages", json=it.asked(system="Be brief."))).json()
        assert prompt_of(it, embedded) == "<system>Be brief.<user>How is it in Oslo?<assistant>"
        prompt = len(it.fake.requests[0].input_ids)
        assert body.pop("id").startswith("msg")
        assert body == {
            "model": "tiny",
            "content": [{"text": "Hello there!", "type": "text"}],
            "usage": {
                "input_tokens": prompt - 4,
                "output_tokens": 3,
                "cache_read_input_tokens": 4,
                "cache_creation_input_tokens": 0,
            },
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "type": "message",
            "role": "assistant",
            "weight_version": "default",
        }


@run
async def test_an_answer_says_of_which_weights_it_is_streamed_and_not(embedded):
    async with talking(embedded, "Hello there!") as it:
        it.service.engine.weight_version = "step-8"
        assert (await it.ask()).weight_version == "step-8"
        events = [event async for event in await it.ask(stream=True)]
        told = [(event.type, getattr(event, "weight_version", None)) for event in events]
        assert told[-2:] == [("message_delta", "step-8"), ("message_stop", None)]
        assert {version for _, version in told[:-2]} == {None}
        async with it.client.messages.stream(**it.asked()) as stream:
            assert (await stream.get_final_message()).content[0].text == "Hello there!"


@run
async def test_a_stream_names_its_events_and_ends_without_a_sentinel(embedded):
    async with talking(embedded, "Hello there!") as it:
        response = await it.http.post("/v1/messages", json=it.asked(stream=True))
        events = [event.split("\n") for event in response.text.split("\n\n") if event]
        names = [name.removeprefix("event: ") for name, _ in events]
        deltas = ["content_block_delta"] * names.count("content_block_delta")
        assert names == [
            "message_start",
            "content_block_start",
            *deltas,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert all(
            f'"type":"{name}"' in data for name, (_, data) in zip(names, events, strict=True)
        )


@pytest.mark.parametrize("stream", [False, True])
@run
async def test_thoughts_text_and_calls_are_blocks_of_their_own(embedded, stream):
    async with talking(embedded, f"<think>\nHm.\n</think>\n\n{CALLS}") as it:
        if stream:
            async with it.client.messages.stream(**it.asked(tools=TOOLS)) as events:
                message = await events.get_final_message()
        else:
            message = await it.ask(tools=TOOLS)
        kinds = [block.type for block in message.content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        thought, said, weather, stop = message.content
        assert (thought.thinking, said.text) == ("Hm.", "Let me see.\n")
        assert (weather.name, weather.input) == ("get_weather", {"city": "Oslø"})
        assert (stop.name, stop.input) == ("stop", {})
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens > 0
        assert prompt_of(it, embedded).startswith("[get_weather][stop]<user>")


@run
async def test_a_conversation_goes_on_with_what_its_tools_said(embedded):
    async with talking(embedded, CALLS) as it:
        message = await it.ask(tools=TOOLS)
        used = [block for block in message.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "fine"} for block in used
        ]
        results[1]["content"] = [{"type": "text", "text": "done"}]
        said = [{"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}}]
        await it.ask(
            tools=TOOLS,
            messages=[
                *ASK,
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": [*results, *said]},
            ],
        )
        assert prompt_of(it, embedded).endswith(
            '<assistant>Let me see.\n<tool_call>{"name": "get_weather", "arguments": '
            '{"city": "Oslø"}}</tool_call><tool_call>{"name": "stop", "arguments": {}}</tool_call>'
            "<tool>fine<tool>done<user>Well?<assistant>"
        )


@run
async def test_a_last_message_of_the_assistants_is_continued(embedded):
    async with talking(embedded, "fine.") as it:
        await it.ask(messages=[*ASK, {"role": "assistant", "content": "It is"}])
        assert prompt_of(it, embedded).endswith("<assistant>It is")


@pytest.mark.parametrize(
    ("choice", "begins"),
    [
        ({"type": "any", "disable_parallel_tool_use": True}, ["get_weather", "stop"]),
        ({"type": "tool", "name": "stop"}, ["stop"]),
    ],
)
@run
async def test_a_choice_of_tools_is_the_engines_grammar(embedded, choice, begins):
    async with talking(embedded, CALLS) as it:
        await it.ask(tools=TOOLS, tool_choice=choice)
        tag = it.fake.requests[-1].sampling_params.structural_tag
        assert all(f'\\"name\\": \\"{name}\\"' in tag for name in begins)
        assert tag.count('"begin"') == len(begins)


@run
async def test_stop_sequences_and_lengths_are_told_as_the_reason(embedded):
    async with talking(embedded, "one two three four") as it:
        message = await it.ask(stop_sequences=[" three"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " three")
        assert message.content[0].text == "one two"
        assert (await it.ask(max_tokens=2)).stop_reason == "max_tokens"


@run
async def test_thinking_is_the_templates_switch(embedded):
    async with talking(embedded, "Hm.</think>Yes.") as it:
        message = await it.ask(thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in message.content] == ["thinking", "text"]
        message = await it.ask(thinking={"type": "disabled"})
        assert [block.type for block in message.content] == ["text"]


@run
async def test_tokens_are_counted_without_an_answer(embedded):
    async with talking(embedded, "Hello") as it:
        count = await it.client.messages.count_tokens(
            model="tiny", messages=ASK, system="Be brief.", tools=TOOLS
        )
        assert not it.fake.requests
        message = await it.ask(system="Be brief.", tools=TOOLS)
        assert count.input_tokens == message.usage.input_tokens


BAD = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, r"messages\[0\].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
     r"messages\[0\].content\[0\].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\].type"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "fly"}}, "'fly'"),
    ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"extra_body": {"temperature": 5}}, "temperature"),
    ({"extra_body": {"mcp_servers": [{"url": "http://x"}]}}, "mcp_servers"),
]  # fmt: skip


@run
async def test_errors_have_anthropics_shape(embedded):
    async with talking(embedded, "Hello") as it:
        for wrong, named in BAD:
            with pytest.raises(anthropic.BadRequestError, match=named) as caught:
                await it.ask(**wrong)
            body = caught.value.body
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
            assert body["request_id"] == caught.value.response.headers["request-id"]
        with pytest.raises(anthropic.NotFoundError, match="no model 'large'"):
            await it.ask(model="large")
        wrong = await it.http.get("/v1/messages")
        assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
        assert not it.fake.requests


@run
async def test_a_key_is_asked_for_in_anthropics_shape(embedded):
    server = ServerConfig(host="127.0.0.1", port=0, api_key=("secret",))
    async with talking(embedded, "Hello", server=server) as it:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await it.ask()
        assert caught.value.body["error"]["type"] == "authentication_error"
        opened = it.client.with_options(api_key="secret")
        assert (await opened.messages.create(**it.asked())).content[0].text == "Hello"


@run
async def test_a_stream_that_fails_says_so_and_pings_while_it_waits(embedded):
    timings = Timings(first_output_s=0.01, ping_s=0.05)
    async with talking(embedded, "word " * 400, timings=timings, step_s=0.02) as it:
        it.fake.held.set()
        text = ""
        async with it.http.stream("POST", "/v1/messages", json=it.asked(stream=True)) as response:
            async for line in response.aiter_lines():
                text += line + "\n"
                if line == "event: ping":
                    await asyncio.to_thread(it.fake.close)
        assert 'event: ping\ndata: {"type": "ping"}\n\n' in text
        last = text.strip().split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        assert '"overloaded_error"' in last
