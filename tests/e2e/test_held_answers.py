"""Answers that are held to grammars, by a running server."""

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import openai
import psutil
import pytest
from tests.e2e.conftest import MODEL

ASK = [{"role": "user", "content": "Describe a drummer."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "plays": {"enum": ["drums", "bass"]},
    },
    "required": ["name", "age", "plays"],
}


def ask(client: openai.OpenAI, **options):
    options = {"model": MODEL, "messages": ASK, "max_tokens": 200} | options
    return client.chat.completions.create(timeout=120, **options).choices[0]


def schema(value):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


def test_no_worker_runs_before_the_first_grammar_and_one_afterwards(server, client):
    def workers():
        tree = psutil.Process(server.process.pid).children(recursive=True)
        return [child for child in tree if "drumline.grammar.worker" in child.cmdline()]

    ask(client, max_tokens=2)
    assert workers() == []
    ask(client, response_format={"type": "json_object"}, max_tokens=2)
    assert len(workers()) == 1


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_of_many_kinds_fit_while_free_ones_run_beside_them(client, temperature):
    def held(seed):
        return ask(client, response_format=schema(PERSON), seed=seed, temperature=temperature)

    def free(seed):
        return ask(client, seed=seed, max_tokens=20, temperature=temperature)

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(held, seed) for seed in range(4)]
        others = [pool.submit(free, seed) for seed in range(3)]
    for answer in (future.result() for future in answers):
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.message.content), PERSON)
    assert all(future.result().message.content for future in others)


def test_choices_regexes_and_grammars_hold(client):
    chosen = ask(client, extra_body={"structured_outputs": {"choice": ["left", "right"]}})
    assert chosen.message.content in {"left", "right"}
    matched = ask(client, extra_body={"guided_regex": "[0-9]{3}-[a-z]{2}"})
    assert re.fullmatch("[0-9]{3}-[a-z]{2}", matched.message.content)
    derived = ask(client, extra_body={"guided_grammar": 'root ::= "yes" | "no" "!"'})
    assert derived.message.content in {"yes", "no!"}


def test_an_answer_that_ignores_eos_still_ends_with_its_grammar(client):
    answer = ask(client, extra_body={"guided_choice": ["left"], "ignore_eos": True})
    assert (answer.message.content, answer.finish_reason) == ("left", "stop")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"response_format": schema({"not": {"minimum": 3}})}, "the keyword not is not supported"),
        ({"extra_body": {"guided_regex": "(a"}}, "regex grammar cannot be used"),
        ({"response_format": schema({}), "extra_body": {"guided_regex": "a"}}, "set together"),
    ],
)
def test_a_grammar_that_never_compiles_is_the_clients_fault_by_name(client, options, said):
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        ask(client, **options)


SMALL = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "plays": {"enum": ["drums", "bass"]},
    },
    "required": ["age", "plays"],
}
PHONE = "[0-9]{3}-[a-z]{2}"


async def many(url: str, count: int) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def answered(seed: int, **options) -> str:
            reply = await client.chat.completions.create(
                model=MODEL, messages=ASK, seed=seed, temperature=1, timeout=240, **options
            )
            return reply.choices[0].message.content

        async def json_(seed: int) -> None:
            # Room for nine gaps of as much white space as a gap may have.
            text = await answered(seed, response_format=schema(SMALL), max_tokens=350)
            jsonschema.validate(json.loads(text), SMALL)

        async def phone(seed: int) -> None:
            text = await answered(seed, extra_body={"guided_regex": PHONE})
            assert re.fullmatch(PHONE, text), text

        async def free(seed: int) -> None:
            assert await answered(seed, max_tokens=12)

        async def left(seed: int) -> None:
            held = {"response_format": {"type": "json_object"}} if seed % 8 < 4 else {}
            stream = await client.chat.completions.create(
                model=MODEL, messages=ASK, seed=seed, stream=True, max_tokens=400,
                timeout=240, **held,
            )  # fmt: skip
            async for _ in stream:
                break
            await stream.close()

        kinds = (json_, phone, free, left)
        await asyncio.gather(*(kinds[seed % 4](seed) for seed in range(count)))


def test_held_answers_are_right_among_many_free_and_aborted_ones_and_every_page_comes_back(
    server, http: httpx.Client
):
    asyncio.run(many(server.url, 64))

    def pages() -> list[dict]:
        view = http.get("/debug/kv").json()
        assert view["conserved"]
        return [pool for rank in view["ranks"] for pool in rank["pools"].values()]

    wait_until(lambda: not any(pool["active"] for pool in pages()), pages)
    # Nobody who left has left a compile behind.
    tree = psutil.Process(server.process.pid).children(recursive=True)
    assert len([child for child in tree if "drumline.grammar.worker" in child.cmdline()]) <= 1


def wait_until(holds, shown, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.1)


def test_a_model_is_made_to_call_a_tool(client):
    tool = {"type": "function", "function": {"name": "introduce", "parameters": PERSON}}
    choice = ask(client, tools=[tool], tool_choice="required", temperature=0)
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "introduce")
    jsonschema.validate(json.loads(call.function.arguments), PERSON)
