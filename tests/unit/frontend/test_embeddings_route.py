"""POST /v1/embeddings, with an engine that makes up vectors."""

import asyncio
import base64

import numpy as np
import openai
import pytest
from tests.fakes.http import run, served, until

from drumline.core.config import ServerConfig


async def embed(server, **body):
    return await server.http.post("/v1/embeddings", json=body)


def unit(*values):
    return pytest.approx(np.array(values) / np.linalg.norm(values), abs=1e-6)


@run
async def test_every_kind_of_input_has_a_vector_of_length_one_in_its_order(embedded):
    ids = embedded.encode("Hello there", add_special=True)
    async with served(embedded) as server:
        for given, prompts in (
            ("Hello there", [ids]),
            (["Hello there", "a"], [ids, embedded.encode("a", add_special=True)]),
            ([5, 6, 7], [[5, 6, 7]]),
            ([[5], [6, 9]], [[5], [6, 9]]),
        ):
            server.fake.requests.clear()
            reply = (await embed(server, input=given, model="tiny")).json()
            assert [asked.input_ids for asked in server.fake.requests] == prompts
            assert [each["index"] for each in reply["data"]] == list(range(len(prompts)))
            for each, prompt in zip(reply["data"], prompts, strict=True):
                assert each["embedding"] == unit(len(prompt), prompt[-1], 1)
            tokens = sum(map(len, prompts))
            assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
            assert (reply["object"], reply["model"], reply["pooling"]) == ("list", "tiny", "mean")
            assert reply["weight_version"] == "default"


@run
async def test_it_asks_for_one_token_and_says_the_pooling_under_our_name(embedded):
    async with served(embedded) as server:
        reply = await embed(server, input=[5], pooling="last", priority=3, cache_salt="x")
        assert reply.json()["pooling"] == "last"
        (asked,) = server.fake.requests
        assert asked.sampling_params.max_new_tokens == 1
        assert asked.sampling_params.custom_params == {
            "drumline": {"embed": "last", "priority": 3, "cache_salt": "x"}
        }


@run
async def test_base64_is_the_float32_bytes_and_openais_client_reads_it(embedded):
    async with served(embedded) as server:
        numbers = (await embed(server, input=[5, 6])).json()["data"][0]["embedding"]
        text = (await embed(server, input=[5, 6], encoding_format="base64")).json()
        told = np.frombuffer(base64.b64decode(text["data"][0]["embedding"]), "<f4")
        assert told.tolist() == pytest.approx(numbers)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            made = await client.embeddings.create(input=["Hello"], model="tiny")
            assert len(made.data[0].embedding) == 3
            assert made.usage.prompt_tokens == 1


@run
async def test_what_cannot_be_is_refused_by_name(embedded):
    async with served(embedded) as server:
        for body, param in (
            ({"input": ""}, "input"),
            ({"input": []}, "input"),
            ({"input": [[]]}, "input"),
            ({"input": [1, "a"]}, "input"),
            ({"input": ["a", [1]]}, "input"),
            ({"input": [10**6]}, "input"),
            ({"input": [1] * 3000}, "input"),
            ({"input": "a", "pooling": "max"}, "pooling"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
            ({"input": "a", "dimensions": 2}, "dimensions"),
            ({"input": "a", "normalize": False}, None),
            ({}, "input"),
        ):
            reply = await embed(server, **body)
            if param is None:
                assert reply.status_code == 200
            else:
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), body
        assert (await embed(server, input="a", dimensions=3)).status_code == 200
        assert (await embed(server, input="a", model="other")).status_code == 404
        assert (await embed(server, input=[1] * 3000, truncate_prompt_tokens=7)).status_code == 200
        assert len(server.fake.requests[-1].input_ids) == 7
        assert len(server.service.live) == 0


@run
async def test_an_engine_that_knows_no_vectors_is_told_apart_from_a_fault(embedded):
    async with served(embedded, embeds=False) as server:
        reply = await embed(server, input="a")
        assert (reply.status_code, reply.json()["error"]["code"]) == (501, "unsupported")
    async with served(embedded, refuse=lambda _: {"message": "full", "status_code": 429}) as server:
        reply = await embed(server, input="a")
        assert (reply.status_code, reply.json()["error"]["message"]) == (429, "full")


@run
async def test_whoever_leaves_or_is_aborted_or_takes_too_long_takes_all_inputs_along(embedded):
    async with served(embedded, server=ServerConfig(port=0, request_timeout=0.3)) as server:
        server.fake.held.set()
        assert (await embed(server, input=["a", "b"])).status_code == 408
        await until(lambda: len(server.fake.aborted) == 2)
        asking = asyncio.create_task(embed(server, input=["a", "b"]))
        await until(lambda: len(server.fake.requests) == 4)
        asking.cancel()
        await until(lambda: len(server.fake.aborted) == 4)
        headers = {"x-request-id": "mine"}
        asking = asyncio.create_task(
            server.http.post("/v1/embeddings", json={"input": ["a", "b"]}, headers=headers)
        )
        await until(lambda: len(server.fake.requests) == 6)
        told = await server.http.post("/abort", json={"rid": "mine"})
        assert told.json()["aborted"] == 2
        assert (await asking).json()["error"]["code"] == "aborted"
        await until(lambda: not server.service.live)


@run
async def test_what_outlasts_the_drain_is_told_that_the_server_ends(embedded, caplog):
    async with served(embedded, drain_timeout_s=0.2) as server:
        server.fake.held.set()
        asking = asyncio.create_task(embed(server, input=["a", "b"]))
        await until(lambda: len(server.fake.requests) == 2)
        server.stop.set()
        reply = await asking
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
        await server.serving
        await until(lambda: len(server.fake.aborted) == 2)
    assert not [record for record in caplog.records if record.exc_info]
