"""POST /v1/completions, over real sockets, against a scripted engine."""

from tests.fakes.http import run, served


def echo(request):
    return request.input_ids


@run
async def test_a_text_is_continued(embedded):
    async with served(embedded, says=" there!") as it:
        body = (await it.complete(prompt="Hello", max_tokens=64)).json()
        assert body.pop("id").startswith("cmpl-")
        assert body.pop("created")
        assert body == {
            "object": "text_completion",
            "model": "tiny",
            "choices": [
                {
                    "index": 0,
                    "text": " there!",
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ],
            "usage": {
                "prompt_tokens": 1,
                "completion_tokens": 2,
                "total_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            "metadata": {"weight_version": "default"},
        }


@run
async def test_an_answer_without_a_length_has_sixteen_tokens_at_most(embedded):
    async with served(embedded, says="a b c d e f g h i j k l m n o p q r") as it:
        body = (await it.complete(prompt="x")).json()
        assert body["usage"]["completion_tokens"] == 16
        assert body["choices"][0]["finish_reason"] == "length"


KINDS_OF_PROMPTS = [
    ("one", ["one"]),
    (["one", "two three"], ["one", "two three"]),
    ([788, 216], ["In "]),
    ([[788], [216, 34]], ["In", " 2"]),
]


@run
async def test_every_kind_of_prompt_is_taken(embedded):
    async with served(embedded, says=echo) as it:
        for prompt, texts in KINDS_OF_PROMPTS:
            body = (await it.complete(prompt=prompt)).json()
            assert [choice["text"] for choice in body["choices"]] == texts
            assert body["usage"]["prompt_tokens"] == body["usage"]["completion_tokens"]


@run
async def test_answers_of_several_prompts_are_numbered_prompt_by_prompt(embedded):
    def says(request):
        return [*request.input_ids, *embedded.encode(f" {request.sampling_params.seed}",
                                                     add_special=False)]  # fmt: skip

    async with served(embedded, says=says) as it:
        body = (await it.complete(prompt=["a", "b"], n=2, seed=1)).json()
        assert [choice["text"] for choice in body["choices"]] == ["a 1", "a 2", "b 1", "b 2"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == 2


@run
async def test_a_stream_is_text_then_reason_then_usage_then_sentinel(embedded):
    async with served(embedded, says=" there!") as it:
        *events, last = await it.events(
            "/v1/completions", prompt="Hello", stream_options={"include_usage": True}
        )
        assert last == "[DONE]"
        *chunks, usage = events
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == " there!"
        assert choices[-1]["text"] == ""
        assert [choice["finish_reason"] for choice in choices][-2:] == [None, "stop"]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 2


@run
async def test_log_probabilities_are_columns(embedded):
    async with served(embedded, says=" there you are") as it:
        body = (await it.complete(prompt="Hello", logprobs=1)).json()
        columns = body["choices"][0]["logprobs"]
        assert columns["tokens"] == [" there", " you", " are"]
        assert columns["token_logprobs"] == [-0.5, -0.5, -0.5]
        assert columns["top_logprobs"] == [{" there": -0.5}, {" you": -0.5}, {" are": -0.5}]
        assert columns["text_offset"] == [0, 6, 10]
        *events, _ = await it.events("/v1/completions", prompt="Hello", logprobs=0)
        offsets = [
            offset
            for event in events
            for offset in (event["choices"][0]["logprobs"] or {}).get("text_offset", [])
        ]
        assert offsets == [0, 6, 10]


@run
async def test_a_prompt_without_tokens_is_refused(embedded):
    async with served(embedded) as it:
        for prompt in ("", [], [""], [[]], ["a", ""]):
            response = await it.complete(prompt=prompt)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "empty_prompt"
        assert not it.fake.requests


@run
async def test_a_pin_decides_which_engine_answers_and_one_that_is_not_there_is_refused(embedded):
    async with served(embedded, says="yes", engines=3) as it:
        for rank in (2, 0, 0, 1):
            for ask in (
                it.complete(prompt="x", data_parallel_rank=rank),
                it.chat(data_parallel_rank=rank),
            ):
                assert (await ask).status_code == 200
        assert [len(fake.requests) for fake in it.fakes] == [4, 2, 2]
        pins = [request.data_parallel_rank for fake in it.fakes for request in fake.requests]
        assert pins == [0] * 4 + [1] * 2 + [2] * 2
        for wrong in (3, -1):
            reply = await it.complete(prompt="x", data_parallel_rank=wrong)
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["param"] == "data_parallel_rank"
            assert "from 0 to 2" in error["message"]


@run
async def test_requests_without_a_pin_are_spread_over_the_engines(embedded):
    async with served(embedded, says="yes", engines=3) as it:
        for _ in range(6):
            assert (await it.complete(prompt="x")).status_code == 200
        assert [len(fake.requests) for fake in it.fakes] == [2, 2, 2]
