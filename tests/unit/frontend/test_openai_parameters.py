"""Parameters that OpenAI's and vLLM's users send: repeated prompts, ranks, words, ids, salts."""

import pytest
from openai import AsyncOpenAI
from tests.fakes.http import CHAT, run, served

from drumline.wire.own_params import own_params

GREETING = "Hello there!"
WANTED = {"echo": True, "logprobs": 2, "max_tokens": 8}


def own_of(request):
    return own_params(request.sampling_params.custom_params)


# The prompt, repeated


@run
async def test_a_prompt_is_repeated_before_its_answers(embedded):
    async with served(embedded, says=" b") as it:
        for prompt in ("Say a", embedded.encode("Say a", add_special=True)):
            body = (await it.complete(prompt=prompt, echo=True, n=2)).json()
            assert [choice["text"] for choice in body["choices"]] == ["Say a b"] * 2
        *events, last = await it.events("/v1/completions", prompt=["x", "y"], echo=True)
        texts = {0: "", 1: ""}
        for event in events:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
        assert (texts, last) == ({0: "x b", 1: "y b"}, "[DONE]")


@run
async def test_log_probabilities_of_prompt_and_answer_stand_in_one_row(embedded):
    async with served(embedded) as it:
        (choice,) = (await it.complete(prompt="Say a", **WANTED)).json()["choices"]
        told = choice["logprobs"]
        answer = embedded.encode(GREETING, add_special=False)
        assert "".join(told["tokens"]) == choice["text"] == "Say a" + GREETING
        assert told["token_logprobs"] == [None, -1.0] + [-0.5] * len(answer)
        assert told["top_logprobs"][0] is None
        assert {len(top) for top in told["top_logprobs"][1:]} == {2}
        assert told["text_offset"] == [0, 3, 5, 10, 16]
        (request,) = it.fake.requests
        assert (request.logprob_start_len, request.top_logprobs_num) == (0, 2)


@pytest.mark.parametrize("n", [1, 3])
@run
async def test_streamed_and_whole_answers_tell_the_same_of_a_prompt(embedded, n):
    async with served(embedded) as it:
        body = {"prompt": ["Say a", "b b b"], "n": n, **WANTED}
        whole = (await it.complete(**body)).json()
        *events, _ = await it.events("/v1/completions", **body)
        for wanted in whole["choices"]:
            choices = [each for event in events for each in event["choices"]]
            mine = [each for each in choices if each["index"] == wanted["index"]]
            assert "".join(each["text"] for each in mine) == wanted["text"]
            for column in wanted["logprobs"]:
                joined = [
                    cell for each in mine for cell in (each["logprobs"] or {}).get(column, [])
                ]
                assert joined == wanted["logprobs"][column], column
            assert mine[-1]["finish_reason"] == wanted["finish_reason"]


@run
async def test_a_prompt_alone_is_scored_without_an_answer(embedded):
    async with served(embedded) as it:
        body = {"prompt": "Say a", "echo": True, "max_tokens": 0, "logprobs": 1}
        reply = (await it.complete(**body)).json()
        (choice,) = reply["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Say a", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
        assert reply["usage"]["completion_tokens"] == 0
        options = {"include_usage": True, "continuous_usage_stats": True}
        *events, _ = await it.events("/v1/completions", **body, stream_options=options)
        assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == "Say a"
        assert {event["usage"]["completion_tokens"] for event in events} == {0}
        refused = await it.complete(prompt="a", max_tokens=0)
        assert refused.json()["error"]["param"] == "max_tokens"


@run
async def test_an_echo_whose_answer_is_given_up_ends_all_the_same(embedded):
    async with served(embedded, refuse=lambda _: {"message": "no"}) as it:
        *events, last = await it.events("/v1/completions", prompt="Say a", n=2, **WANTED)
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert (reasons.count("abort"), last) == (2, "[DONE]")


@run
async def test_prompts_are_told_of_as_vllm_words_it(embedded):
    async with served(embedded) as it:
        ids = embedded.encode("Say a", add_special=True)
        completion = (await it.complete(prompt="Say a", prompt_logprobs=1)).json()
        first, second = completion["choices"][0]["prompt_logprobs"]
        assert first is None
        assert second == {str(ids[1]): {"logprob": -1.0, "rank": 1, "decoded_token": " a"}}
        chat = (await it.chat(prompt_logprobs=0)).json()
        assert chat["prompt_logprobs"][0] is None
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert "prompt_logprobs" not in (await it.chat()).json()
        for refused in (await it.chat(prompt_logprobs=0, stream=True),
                        await it.complete(prompt="a", prompt_logprobs=21)):  # fmt: skip
            assert refused.json()["error"]["param"] == "prompt_logprobs"


# The best of several


@run
async def test_the_likeliest_answers_of_several_are_given(embedded):
    texts = iter(range(100))

    def says(request):
        return embedded.encode(f" {next(texts)}", add_special=False)

    async with served(embedded, says=says) as it:
        # The engine gives every token the same probability, so the first come first.
        body = (await it.complete(prompt=["x", "y"], n=2, best_of=3, echo=True)).json()
        assert [choice["text"] for choice in body["choices"]] == ["x 0", "x 1", "y 3", "y 4"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert all(choice["logprobs"] is None for choice in body["choices"])
        assert all(request.return_logprob for request in it.fake.requests)
        assert body["usage"]["completion_tokens"] == 6 * 2
        for wrong in ({"best_of": 1, "n": 2}, {"best_of": 129}, {"best_of": 2, "stream": True}):
            refused = await it.complete(prompt="x", **wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


# What engines of ours find beside the wire's places


@run
async def test_words_ids_salts_and_samplers_reach_the_engine(embedded):
    async with served(embedded) as it:
        body = {
            "bad_words": ["there"], "allowed_token_ids": [9, 7, 7], "cache_salt": "tenant 1",
            "typical_p": 0.5, "priority": 3, "logits_processors": {"favour": {"token": 3}},
        }  # fmt: skip
        assert (await it.chat(**body, guided_choice=["a"])).status_code == 200
        own = own_of(it.fake.requests[0])
        spelled = [embedded.encode(text, add_special=False) for text in ("there", " there")]
        assert own.bad_words == spelled
        assert (own.allowed_ids, own.cache_salt) == ([7, 9], "tenant 1")
        assert (own.typical_p, own.priority, own.choice) == (0.5, 3, ["a"])
        assert own.logits_processors == {"favour": {"token": 3}}
        await it.chat(logits_processors=["a", "b"])
        assert own_of(it.fake.requests[1]).logits_processors == {"a": None, "b": None}
        await it.chat(bad_words=[], cache_salt="", typical_p=None, logits_processors={})
        assert it.fake.requests[2].sampling_params.custom_params is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"bad_words": ["a", " "]}, "bad_words[1]"),
        ({"bad_words": ["word " * 40]}, "bad_words[0]"),
        ({"bad_words": ["a"] * 513}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [49152]}, "allowed_token_ids"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"typical_p": 0}, "typical_p"),
        ({"typical_p": 1.5}, "typical_p"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
@run
async def test_what_is_out_of_range_is_refused_by_name(embedded, body, param):
    async with served(embedded) as it:
        refused = await it.chat(**body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert not it.fake.requests


# How a prompt becomes tokens


@run
async def test_a_prompt_is_cut_to_its_last_tokens(embedded):
    async with served(embedded) as it:
        long = "word " * 3000
        await it.complete(prompt=long, truncate_prompt_tokens=5)
        await it.complete(prompt=[5, 6, 7], truncate_prompt_tokens=2)
        await it.complete(prompt=long, truncate_prompt_tokens=-1)
        sizes = [len(request.input_ids) for request in it.fake.requests]
        assert sizes == [5, 2, 2047]
        assert it.fake.requests[1].input_ids == [6, 7]
        echoed = await it.complete(prompt="a b c", truncate_prompt_tokens=1, echo=True)
        assert echoed.json()["choices"][0]["text"] == " c" + GREETING
        talk = [{"role": "user", "content": long}]
        chat = await it.http.post(
            "/v1/chat/completions", json={"messages": talk, "truncate_prompt_tokens": 100}
        )
        assert chat.json()["usage"]["prompt_tokens"] == 100


@run
async def test_special_tokens_are_left_out_on_request(space_marked):
    async with served(space_marked, says=lambda _: [9]) as it:
        for special in (True, False):
            await it.complete(prompt="hello", add_special_tokens=special)
        with_, without = (request.input_ids for request in it.fake.requests)
        assert with_ == space_marked.encode("hello", add_special=True)
        assert without == space_marked.encode("hello", add_special=False)


@run
async def test_the_official_client_reads_what_it_asked_for(embedded):
    async with (
        served(embedded) as it,
        AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as client,
    ):
        told = await client.completions.create(
            model="tiny", prompt="Say a", echo=True, logprobs=2, max_tokens=0
        )
        assert told.choices[0].logprobs.token_logprobs == [None, -1.0]
        best = await client.completions.create(model="tiny", prompt=[[5], [6]], n=1, best_of=2)
        assert [choice.text for choice in best.choices] == [GREETING] * 2
        reply = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=CHAT["messages"], logprobs=True, top_logprobs=20,
            extra_body={"bad_words": ["x"], "cache_salt": "a"},
        )  # fmt: skip
        chat = reply.parse()
        assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 20
        assert chat.usage.prompt_tokens_details.cached_tokens == 0
        assert reply.headers["x-request-id"] == chat.id
