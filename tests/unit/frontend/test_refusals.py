"""What is wrong with a request is said in OpenAI's shape, and the engine never sees it."""

import asyncio
import contextlib
import json
import socket

import httpx
from tests.fakes.http import CHAT, run, served, until

from drumline.core.config import ChatConfig, ServerConfig

USER = {"role": "user", "content": "Hi"}

TOOL = {"type": "function", "function": {"name": "clock"}}

BAD_CHATS = [
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": "Hi"}, "messages", "invalid_type"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "invalid_value"),
    (
        {"messages": [USER, {"role": "user"}]},
        "messages[1].content",
        "missing_required_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "unsupported_content_part",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "missing_required_parameter",
    ),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": 5}, "temperature", "decimal_above_max_value"),
    ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
    ({"top_p": 0}, "top_p", "decimal_below_min_value"),
    ({"top_p": 1.1}, "top_p", "decimal_above_max_value"),
    ({"top_k": -2}, "top_k", "integer_below_min_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"min_p": 2}, "min_p", "decimal_above_max_value"),
    ({"frequency_penalty": 3}, "frequency_penalty", "decimal_above_max_value"),
    ({"presence_penalty": -3}, "presence_penalty", "decimal_below_min_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 129}, "n", "integer_above_max_value"),
    ({"best_of": 3}, "best_of", "unsupported_parameter"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": 10**400}, "max_tokens", "integer_above_max_value"),
    ({"n": 10**400}, "n", "integer_above_max_value"),
    ({"stop_token_ids": [10**30]}, "stop_token_ids", "invalid_token_id"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_token_id"),
    ({"logit_bias": {"1" * 19: 1}}, "logit_bias", "invalid_token_id"),
    ({"max_tokens": 2048}, "max_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": 2048}, "max_completion_tokens", "context_length_exceeded"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "integer_above_max_value"),
    ({"priority": 2**40}, "priority", "integer_above_max_value"),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"min_tokens": -1}, "min_tokens", "integer_below_min_value"),
    ({"stop": ["a", ""]}, "stop", "empty_string"),
    ({"stop": ["x"] * 17}, "stop", "array_above_max_length"),
    ({"stop": 7}, "stop", "invalid_type"),
    ({"stop_token_ids": [49152]}, "stop_token_ids", "invalid_token_id"),
    ({"logit_bias": {"49152": 1}}, "logit_bias", "invalid_token_id"),
    ({"logit_bias": {"Hello": 1}}, "logit_bias", "invalid_token_id"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "decimal_above_max_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_combination"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": {"type": None, "json_schema": {"schema": {}}}}, "response_format.type",
     "missing_required_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_parameter"),
    ({"response_format": {"type": ["text"]}}, "response_format.type", "unsupported_parameter"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema",
     "missing_required_parameter"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
     "response_format.json_schema.schema", "missing_required_parameter"),
    ({"response_format": {"type": "json_schema", "json_schema": [{"schema": {}}]}},
     "response_format.json_schema.schema", "missing_required_parameter"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex",
     "invalid_value"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs", "invalid_value"),
    ({"guided_choice": [3]}, "guided_choice[0]", "invalid_type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [TOOL]}, "tools", "tools_not_in_template"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "invalid_value"),
    ({"tools": [TOOL] * 129}, "tools", "array_above_max_length"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "other"}}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "tool_choice",
     "invalid_combination"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "x", "arguments": "[1"}}]}]},
     "messages[0].tool_calls[0].function.arguments", "invalid_json"),
    ({"return_hidden_states": True}, "return_hidden_states", "unsupported_parameter"),
    ({"regex": "a", "ebnf": "b"}, "ebnf", "invalid_value"),
    ({"regex": 7}, "regex", "invalid_type"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"messages": [{"role": "user", "content": "a"}] * 4097}, "messages",
     "array_above_max_length"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages",
     "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "word " * 300_000}]}, "messages",
     "context_length_exceeded"),
]  # fmt: skip

BAD_COMPLETIONS = [
    ({}, "prompt", "missing_required_parameter"),
    ({"prompt": 7}, "prompt", "invalid_type"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_type"),
    ({"prompt": [[1], 2]}, "prompt", "invalid_type"),
    ({"prompt": [1, 49152]}, "prompt", "invalid_token_id"),
    ({"prompt": [[1], [-1]]}, "prompt", "invalid_token_id"),
    ({"prompt": [5] * 2048}, "prompt", "context_length_exceeded"),
    ({"prompt": ["a"] * 1025}, "prompt", "array_above_max_length"),
    ({"prompt": ["a"] * 100, "n": 11}, "prompt", "too_many_answers"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "integer_above_max_value"),
]


def check(response, status, param, code):
    body = response.json()
    assert response.status_code == status, body
    assert response.headers["x-request-id"]
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"]
    assert error["type"] == "invalid_request_error"


@run
async def test_bad_requests_name_what_is_wrong(embedded):
    async with served(embedded) as it:
        for changes, param, code in BAD_CHATS:
            check(await it.chat(**changes), 400, param, code)
        for body, param, code in BAD_COMPLETIONS:
            check(await it.complete(**body), 400, param, code)
        check(await it.chat(model="gpt-4"), 404, "model", "model_not_found")
        check(await it.complete(prompt="a", model="gpt-4"), 404, "model", "model_not_found")
        assert not it.fake.requests
        assert (await it.metrics())['drumline:http_refusals_total{status="404"}'] == 2


@run
async def test_what_is_quoted_of_a_long_value_is_its_ends(embedded):
    long = "x" * 500_000
    user = {"role": "user", "content": "Hi"}
    template = (
        "{% if messages[0].content[99:] %}{{ raise_exception(messages[0].content) }}{% endif %}"
    )
    async with served(embedded, chat=ChatConfig(chat_template=template)) as it:
        for body, named in (
            ({"model": long}, "no model 'xxx"),
            ({"messages": [{"role": long, "content": "Hi"}]}, "messages[0].role is 'xxx"),
            ({"messages": [{"role": "user", "content": [{"type": long}]}]}, "type is 'xxx"),
            ({"messages": [{"role": "user", "content": long}]}, "messages: xxx"),
            ({"tools": [{"type": long}]}, "tools[0].type: 'xxx"),
            ({"tools": [TOOL], "tool_choice": {"type": "function", "name": long}}, "names 'xxx"),
            ({"response_format": {"type": long}}, "response_format.type: 'xxx"),
            ({"response_format": {"type": [[long[:999]] * 9] * 9}}, "response_format.type: [["),
            ({"structured_outputs": {long: 1}}, "structured_outputs: 'xxx"),
            ({"logit_bias": {long: 1}}, "logit_bias.xxx"),
        ):
            error = (await it.chat(**body)).json()["error"]
            assert named in error["message"]
            assert len(error["message"]) < 1000, named
        for path, body, named in (
            ("/v1/completions", {"prompt": [10**4000]}, "token id 1000"),
            ("/v1/responses", {"input": [{"type": long}]}, "input[0].type: is 'xxx"),
            ("/v1/messages", {"messages": [user | {"role": long}]}, "role: is 'xxx"),
        ):
            reply = await it.http.post(path, json={"max_tokens": 4} | body)
            error = reply.json()["error"]
            assert reply.status_code == 400
            assert named in error["message"]
            assert len(error["message"]) < 1000, named


@run
async def test_a_bound_is_said_as_the_number_that_it_is(embedded):
    async with served(embedded) as it:
        response = await it.chat(top_p=1e-12)
        check(response, 400, "top_p", "decimal_below_min_value")
        assert "at least 1e-09 and at most 1.0" in response.json()["error"]["message"]


@run
async def test_what_is_no_json_object_is_refused(embedded):
    async with served(embedded) as it:
        for body in (
            b"",
            b"{",
            b"\xff",
            json.dumps(CHAT).encode() + b" {}",
            b'{"messages": [NaN',
            rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
        ):
            response = await it.http.post("/v1/chat/completions", content=body)
            check(response, 400, None, "invalid_json")
        for body in (b"[1]", b"7", b"[" * 100_000):
            response = await it.http.post("/v1/chat/completions", content=body)
            check(response, 400, None, "invalid_type")


@run
async def test_a_prompt_over_the_pool_is_refused_with_both_numbers(embedded):
    async with served(embedded, registers={"kv_cache_size_tokens": 64}) as it:
        response = await it.complete(prompt=[5] * 100)
        check(response, 400, "prompt", "kv_pool_exceeded")
        assert "100 tokens" in response.json()["error"]["message"]
        assert "64" in response.json()["error"]["message"]
        response = await it.complete(prompt=[5] * 40, max_tokens=30)
        check(response, 400, "max_tokens", "kv_pool_exceeded")
        assert "70" in response.json()["error"]["message"]
        assert not it.fake.requests
        assert (await it.complete(prompt=[5] * 60)).json()["usage"]["completion_tokens"] <= 4


@run
async def test_a_body_over_the_limit_is_refused(embedded):
    server = ServerConfig(host="127.0.0.1", port=0, max_body_bytes=1000)
    async with served(embedded, server=server) as it:
        check(
            await it.chat(messages=[{"role": "user", "content": "x" * 1000}]),
            413, None, "body_too_large",
        )  # fmt: skip

        async def endless():
            for _ in range(100):
                yield b"x" * 1000

        response = None
        with contextlib.suppress(httpx.TransportError):  # closed before everything was sent
            response = await it.http.post("/v1/completions", content=endless())
        assert response is None or response.status_code == 413
        assert (await it.chat()).status_code == 200


@run
async def test_unknown_paths_and_wrong_methods_are_told_apart(embedded):
    async with served(embedded) as it:
        check(await it.http.get("/v1/nothing"), 404, None, "unknown_url")
        response = await it.http.get("/v1/chat/completions")
        check(response, 405, None, "method_not_allowed")
        assert response.headers["allow"] == "POST"
        check(await it.http.post("/health"), 405, None, "method_not_allowed")
        version = (await it.http.get("/version")).json()
        assert version == {"version": "0.1.0", "engine": "tokenspeed-fake"}


@run
async def test_a_request_id_comes_back_and_may_not_be_in_use(embedded):
    async with served(embedded) as it:
        given = {"x-request-id": "mine-1"}
        it.fake.held.set()
        first = asyncio.create_task(it.chat(headers=given))
        await until(lambda: it.fake.requests)
        second = await it.chat(headers=given)
        check(second, 409, "X-Request-Id", "request_id_in_use")
        assert second.headers["x-should-retry"] == "false"
        it.fake.held.clear()
        response = await first
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "mine-1"
        assert response.json()["id"] == "chatcmpl-mine-1"
        again = await it.chat(headers=given)
        assert again.status_code == 200
        assert len({request.rid for request in it.fake.requests}) == 2
        for bad in ("a b", "x" * 129, ""):
            response = await it.chat(headers={"x-request-id": bad})
            check(response, 400, "X-Request-Id", "invalid_request_id")


ENGINE_REFUSALS = [
    ({"status_code": 400, "message": "no such room"}, 400),
    ({"status_code": 429, "message": "queue full"}, 429),
    ({"status_code": 503, "message": "paused"}, 503),
    ({"status_code": 599, "message": "odd"}, 500),
    ({"err_type": 523, "message": "not finite"}, 500),
]


@run
async def test_a_refusal_by_the_engine_keeps_its_status(embedded):
    said = []
    async with served(embedded, refuse=lambda request: said[-1]) as it:
        for details, status in ENGINE_REFUSALS:
            said.append(details)
            for stream in (False, True):
                response = await it.chat(stream=stream)
                assert response.status_code == status
                assert response.json()["error"]["message"] == details["message"]
        counted = [
            line
            for line in (await it.http.get("/metrics")).text.splitlines()
            if line.startswith("tokenspeed:num_nan_aborted_requests_total")
        ]
        assert [line.split()[-1] for line in counted] == ["2.0"]


@run
async def test_nested_json_does_not_exhaust_the_stack(embedded):
    async with served(embedded) as it:
        depth = 100_000
        body = json.dumps(CHAT)[:-1] + ', "metadata": ' + "[" * depth + "]" * depth + "}"
        response = await it.http.post("/v1/chat/completions", content=body.encode())
        assert response.status_code in {200, 400}
        assert (await it.chat()).status_code == 200


@run
async def test_garbage_on_the_socket_harms_nobody(embedded):
    async with served(embedded) as it:
        host, port = it.url.removeprefix("http://").split(":")
        for junk in (b"\x16\x03\x01\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\n", b"\0" * 1000):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(junk)
        assert (await it.chat()).status_code == 200
