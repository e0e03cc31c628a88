"""What the official client and a plain one get from a running server."""

import json
import re
import threading

import anthropic
import httpx
import openai
import pytest
from tests.e2e.conftest import MODEL
from tests.e2e.processes import eventually

COUNT = [{"role": "user", "content": "Count from one to ten in words."}]
STORY = [{"role": "user", "content": "Tell me a very long story about a drummer."}]


def ask(client: openai.OpenAI, messages=COUNT, **options):
    options = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 16} | options
    return client.chat.completions.create(**options)


def answered(client, **options) -> str:
    return ask(client, **options).choices[0].message.content


def streamed(client, **options) -> tuple[str, list]:
    chunks = list(ask(client, stream=True, **options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return text, chunks


def idle(http: httpx.Client) -> bool:
    """Whether server and engine hold nothing any more, as they report it themselves."""
    text = http.get("/metrics").text
    busy = re.findall(r"^\S*num_requests_(?:running|waiting)\S* (\S+)", text, re.MULTILINE)
    pages = re.findall(r"^\S*kv_cache_usage_perc\S* (\S+)", text, re.MULTILINE)
    free = busy and pages and not any(map(float, busy + pages))
    return bool(free) and http.get("/health").json()["in_flight"] == 0


def test_a_stream_and_a_whole_answer_say_the_same(client):
    whole = ask(client)
    text, chunks = streamed(client, stream_options={"include_usage": True})
    assert text == whole.choices[0].message.content != ""
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 16
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) > 4


def test_an_answer_begins_before_it_ends(client):
    stream = iter(ask(client, stream=True, max_tokens=40))
    first = next(chunk for chunk in stream if chunk.choices[0].delta.content)
    assert first.choices[0].finish_reason is None
    assert len(list(stream)) > 10


def test_a_prefix_computed_before_is_found_again(client):
    messages = [{"role": "user", "content": "Repeat after me: " + "drum " * 150}]
    first = ask(client, messages, max_tokens=2).usage
    second = ask(client, messages, max_tokens=2).usage
    assert second.prompt_tokens == first.prompt_tokens > 150
    assert second.prompt_tokens_details.cached_tokens >= 128
    assert second.prompt_tokens_details.cached_tokens % 64 == 0


def test_a_seed_repeats_an_answer_and_another_seed_does_not(client):
    options = {"temperature": 1.0, "max_tokens": 20, "messages": STORY}
    assert answered(client, seed=5, **options) == answered(client, seed=5, **options)
    assert answered(client, seed=5, **options) != answered(client, seed=6, **options)


def test_n_answers_come_with_their_indices(client):
    answers = ask(client, n=3, temperature=1.0, seed=1, messages=STORY).choices
    assert [choice.index for choice in answers] == [0, 1, 2]
    assert len({choice.message.content for choice in answers}) == 3
    _, chunks = streamed(client, n=2, temperature=1.0, seed=1, messages=STORY)
    ends = [c.choices[0].index for c in chunks if c.choices and c.choices[0].finish_reason]
    assert sorted(ends) == [0, 1]


def test_a_stop_string_ends_the_answer_and_no_part_of_it_is_shown(client):
    whole = answered(client)
    middle = len(whole) // 2
    stop = whole[middle : middle + 5]
    until = whole[: whole.index(stop)]
    stopped = ask(client, stop=[stop]).choices[0]
    assert stopped.message.content == until
    assert stopped.finish_reason == "stop"
    assert streamed(client, stop=[stop])[0] == until


def test_completions_continue_texts_and_token_ids(client):
    options = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    text = client.completions.create(prompt="The capital of France is", **options)
    assert text.choices[0].text.startswith(" Paris")
    parts = client.completions.create(prompt="The capital of France is", stream=True, **options)
    assert "".join(part.choices[0].text for part in parts) == text.choices[0].text
    several = client.completions.create(prompt=["One, two,", "Red, green,"], **options)
    assert [choice.index for choice in several.choices] == [0, 1]
    ids = client.completions.create(prompt=[1, 2, 3], **options)
    assert ids.usage.prompt_tokens == 3


def test_answers_at_the_same_time_are_those_given_alone(client):
    prompts = [[{"role": "user", "content": f"Say the number {n}."}] for n in range(6)]
    alone = [answered(client, messages=prompt) for prompt in prompts]
    together: dict[int, str] = {}

    def run(n):
        together[n] = answered(client, messages=prompts[n])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[n] for n in range(6)] == alone


def test_text_beyond_ascii_is_the_same_in_chunks(client):
    messages = [{"role": "user", "content": "Repeat exactly: né ß 漢字 🥁🥁"}]
    options = {"messages": messages, "max_tokens": 24, "temperature": 1.0, "seed": 3}
    text, _ = streamed(client, **options)
    assert text == answered(client, **options)
    assert not text.isascii()


def test_what_is_served_can_be_asked(client, http):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert http.get("/health").json()["status"] == "ok"
    assert "version" in http.get("/version").json()
    assert "tokenspeed:num_requests" in http.get("/metrics").text


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "other", "messages": COUNT}, 404, "model_not_found"),
        ({"messages": []}, 400, "empty_array"),
        ({"messages": COUNT, "n": 0}, 400, None),
        ({"messages": COUNT, "max_tokens": 1_000_000}, 400, "context_length_exceeded"),
        ({"messages": COUNT, "temperature": 9}, 400, None),
        ({"messages": [{"role": "user", "content": "drum " * 9000}]}, 400, None),
    ],
)
def test_a_wrong_request_gets_openais_error_and_never_reaches_the_engine(
    server, http, body, status, code
):
    eventually(lambda: idle(http))
    before = server.said.count("Req: ")
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["message"]
    if code is not None:
        assert error["code"] == code
    assert server.said.count("Req: ") == before
    assert idle(http)


def test_broken_json_and_strange_token_ids_are_refused(http):
    assert http.post("/v1/chat/completions", content=b"{").status_code == 400
    reply = http.post("/v1/completions", json={"prompt": [10**6]})
    assert reply.status_code == 400
    assert "1000000" in reply.json()["error"]["message"]


def test_a_request_id_in_flight_is_answered_409(http):
    headers = {"X-Request-Id": "twice"}
    body = {"messages": STORY, "max_tokens": 400, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as first:
        lines = first.iter_lines()
        next(lines)
        again = http.post("/v1/chat/completions", json=body, headers=headers)
        assert again.status_code == 409
        assert next(lines) is not None
    eventually(lambda: idle(http))


def test_a_client_that_hangs_up_on_a_stream_frees_everything(client, http):
    stream = ask(client, STORY, stream=True, max_tokens=2000)
    for _, _ in zip(range(3), stream, strict=False):
        pass
    assert not idle(http)
    stream.close()
    eventually(lambda: idle(http))


def test_a_client_that_hangs_up_while_it_waits_frees_everything(server, http):
    body = {"messages": STORY, "max_tokens": 2000}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=1.0)
    eventually(lambda: idle(http))


def test_the_log_has_no_prompt_and_no_traceback(server, client):
    ask(client, [{"role": "user", "content": "a secret word: xylophone"}])
    assert "xylophone" not in server.said
    assert "Traceback" not in server.said


def test_server_sent_events_end_with_done(http):
    body = {"messages": COUNT, "max_tokens": 2, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        events = [line for line in reply.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["id"] for event in events[:-1])


def test_anthropics_client_and_the_responses_api_get_the_same_answer(server, client):
    text = answered(client)
    body = {"model": MODEL, "extra_body": {"temperature": 0}}
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other,
        other.messages.stream(max_tokens=16, messages=COUNT, **body) as stream,
    ):
        message = stream.get_final_message()
    assert message.content[0].text == text
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 16)
    response = client.responses.create(input=COUNT, max_output_tokens=16, **body)
    assert response.output_text == text
    assert response.usage.input_tokens == (
        message.usage.input_tokens + message.usage.cache_read_input_tokens
    )
