"""`drumline serve --pipeline-parallel-size 2` answers over HTTP what one rank does."""

import json

import httpx
import pytest
from tests.e2e.conftest import MODEL
from tests.e2e.processes import Server

PROMPTS = ("The drummers of the corps", "A line of drums is", "Once upon a time in a far country")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "drums": {"type": "integer"}},
    "required": ["name", "drums"],
}


@pytest.fixture(scope="module")
def pipeline():
    server = Server("--max-total-tokens", "8192", "--pipeline-parallel-size", "2")
    try:
        yield server.wait_ready()
        server.signal()
        assert server.wait() == 0, server.said
    finally:
        server.close()


def asked(server, body):
    reply = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL} | body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def test_two_stages_of_the_embedded_model_say_what_one_rank_says(server, pipeline):
    assert len(pipeline.ranks()) == 2
    greedy = {"max_tokens": 16, "temperature": 0, "logprobs": 2}
    drawn = {"max_tokens": 16, "temperature": 0.8, "seed": 5, "presence_penalty": 0.5}
    for how, prompts in ((greedy, PROMPTS), (drawn, PROMPTS[:1])):
        both = [asked(each, how | {"prompt": list(prompts)}) for each in (pipeline, server)]
        for mine, theirs in zip(*both, strict=True):
            assert mine["text"] == theirs["text"]
            assert mine["finish_reason"] == theirs["finish_reason"]
            if how is greedy:
                told = [choice["logprobs"]["token_logprobs"] for choice in (mine, theirs)]
                assert told[0] == pytest.approx(told[1], abs=1e-4)


def test_an_answer_of_stages_is_held_to_its_grammar(pipeline):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name a drummer and how many drums he has."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "d", "schema": SCHEMA}},
        "max_tokens": 80,
        "temperature": 0,
    }
    reply = httpx.post(f"{pipeline.url}/v1/chat/completions", json=body, timeout=120)
    told = json.loads(reply.json()["choices"][0]["message"]["content"])
    assert set(told) == {"name", "drums"}


def test_stages_sleep_and_wake_and_say_the_same(pipeline):
    greedy = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    before = asked(pipeline, greedy)[0]["text"]
    for route in ("/sleep", "/wake_up"):
        assert httpx.post(f"{pipeline.url}{route}", timeout=60).status_code == 200
    assert asked(pipeline, greedy)[0]["text"] == before
