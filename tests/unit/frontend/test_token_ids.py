"""`return_token_ids`: the ids of prompt and answer, whole and streamed."""

import pytest
from tests.fakes.http import CHAT, run, served

PATHS = ["/v1/completions", "/v1/chat/completions"]


def asked(path):
    return (CHAT if "chat" in path else {"prompt": "Hi"}) | {"return_token_ids": True}


@pytest.mark.parametrize("path", PATHS)
@run
async def test_a_whole_reply_has_the_ids_of_prompt_and_answer(embedded, path):
    async with served(embedded, says="Hello \N{PILE OF POO}!") as server:
        body = (await server.http.post(path, json=asked(path) | {"n": 2})).json()
        prompts = {tuple(each.input_ids) for each in server.fake.requests}
        assert len(prompts) == 1
        told = body if "chat" in path else body["choices"][0]
        assert tuple(told["prompt_token_ids"]) in prompts
        for choice in body["choices"]:
            assert choice["token_ids"] == embedded.encode(
                "Hello \N{PILE OF POO}!", add_special=False
            )
        plain = (
            await server.http.post(path, json=asked(path) | {"return_token_ids": False})
        ).json()
        assert "token_ids" not in str(plain)


@pytest.mark.parametrize("path", PATHS)
@run
async def test_a_stream_tells_each_id_once_also_those_whose_text_comes_later(embedded, path):
    async with served(embedded, says="Hello \N{PILE OF POO}!") as server:
        *events, _ = await server.events(path, **asked(path), n=2)
        for index in (0, 1):
            choices = [c for e in events for c in e["choices"] if c["index"] == index]
            ids = [id_ for choice in choices for id_ in choice.get("token_ids", ())]
            assert ids == embedded.encode("Hello \N{PILE OF POO}!", add_special=False)
        told = [t for e in events for t in (e, *e["choices"]) if "prompt_token_ids" in t]
        assert len(told) == (1 if "chat" in path else 2)
        assert told[0]["prompt_token_ids"] == server.fake.requests[0].input_ids


@run
async def test_a_prompt_alone_has_no_ids_of_an_answer(embedded):
    async with served(embedded) as server:
        body = {"prompt": "Hi", "echo": True, "max_tokens": 0, "return_token_ids": True}
        (choice,) = (await server.complete(**body)).json()["choices"]
        assert choice["token_ids"] == []
        assert choice["prompt_token_ids"] == server.fake.requests[0].input_ids
