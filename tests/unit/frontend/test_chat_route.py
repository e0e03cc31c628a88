"""POST /v1/chat/completions, over real sockets, against a scripted engine."""

import pytest
from tests.fakes.http import CHAT, run, served, until

from drumline.core.config import ChatConfig

USAGE = {"prompt_tokens": 31, "completion_tokens": 3, "total_tokens": 34,
         "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip


@run
async def test_a_reply_has_the_published_shape(embedded):
    async with served(embedded) as it:
        response = await it.chat()
        body = response.json()
        assert response.status_code == 200
        assert body.pop("id").startswith("chatcmpl-")
        assert body.pop("created") > 1_700_000_000
        assert body == {
            "object": "chat.completion",
            "model": "tiny",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello there!", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ],
            "usage": USAGE,
            "metadata": {"weight_version": "default"},
        }


@run
async def test_the_prompt_is_the_templates(embedded):
    async with served(embedded) as it:
        await it.chat(messages=[{"role": "developer", "content": [
            {"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "Hi"}])  # fmt: skip
        (request,) = it.fake.requests
        assert request.input_ids == embedded.encode(
            "<|im_start|>system\nBe\nbrief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n",
            add_special=False,
        )


@run
async def test_a_stream_begins_with_the_role_and_ends_with_reason_usage_and_sentinel(embedded):
    async with served(embedded) as it:
        *events, last = await it.events(stream_options={"include_usage": True})
        assert last == "[DONE]"
        assert len({event["id"] for event in events}) == 1
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        *chunks, usage = events
        assert usage["choices"] == []
        assert usage["usage"] == USAGE
        assert all(chunk["usage"] is None for chunk in chunks)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello there!"
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [
            "stop"
        ]
        assert choices[-1]["delta"] == {}


@run
async def test_without_stream_options_no_chunk_speaks_of_usage(embedded):
    async with served(embedded) as it:
        *events, last = await it.events()
        assert last == "[DONE]"
        assert not any("usage" in event for event in events)


@run
async def test_continuous_usage_grows_with_the_answer(embedded):
    async with served(embedded, cached_tokens=7) as it:
        *events, _ = await it.events(
            stream_options={"include_usage": True, "continuous_usage_stats": True}
        )
        counts = [event["usage"]["completion_tokens"] for event in events if event["choices"]][1:]
        assert counts == sorted(counts)
        assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}


@run
async def test_no_chunk_breaks_a_character(embedded):
    text = "Grüße 你好 🎉🎊 done"
    async with served(embedded, says=text) as it:
        *events, _ = await it.events()
        chunks = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(chunks) == text
        assert not any("\ufffd" in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
@run
async def test_a_stop_string_across_tokens_ends_the_answer_and_the_work(embedded, stream):
    async with served(embedded, says="one two three four " * 50, step_s=0.002) as it:
        body = {"stop": ["ee fo", "never"]}
        if stream:
            *events, _ = await it.events(**body)
            choices = [event["choices"][0] for event in events]
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            last = choices[-1]
        else:
            reply = (await it.chat(**body)).json()
            (last,) = reply["choices"]
            text = last["message"]["content"]
            assert reply["usage"]["completion_tokens"] == 4
        assert text == "one two thr"
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "ee fo")
        metrics = await it.metrics()
        assert metrics['tokenspeed:request_success_total{model_name="tiny"}'] == 1
        await until(lambda: it.fake.aborted)
        assert it.fake.aborted == [it.fake.requests[0].rid]


@pytest.mark.parametrize("stream", [False, True])
@run
async def test_what_only_began_like_a_stop_string_comes_out_at_the_end(embedded, stream):
    async with served(embedded, says="Hello there!") as it:
        body = {"stop": " there!!", "max_tokens": 3}
        if stream:
            *events, _ = await it.events(**body)
            deltas = [event["choices"][0]["delta"] for event in events]
            assert "".join(delta.get("content", "") for delta in deltas) == "Hello there!"
        else:
            (choice,) = (await it.chat(**body)).json()["choices"]
            assert choice["message"]["content"] == "Hello there!"
            assert choice["finish_reason"] == "length"


@run
async def test_the_stop_string_stays_if_asked_for(embedded):
    async with served(embedded, says="one two three four") as it:
        reply = (await it.chat(stop="three", include_stop_str_in_output=True)).json()
        assert reply["choices"][0]["message"]["content"] == "one two three"


@run
async def test_nothing_ends_an_answer_that_is_shorter_than_min_tokens(embedded):
    async with served(embedded, says="one two three one two three") as it:
        reply = (await it.chat(stop=" two", min_tokens=3)).json()
        assert reply["choices"][0]["message"]["content"] == "one two three one"


@run
async def test_the_token_that_ends_an_answer_is_no_text_of_it(embedded):
    eos = next(iter(embedded.facts.eos_ids))
    dot = embedded.encode(".", add_special=False)[0]
    hello = embedded.encode("Hello", add_special=False)
    async with served(embedded, says=lambda _: [*hello, eos], reason_rides=True) as it:
        for skip in (True, False):
            reply = (await it.chat(skip_special_tokens=skip)).json()
            assert reply["choices"][0]["message"]["content"] == "Hello"
            assert reply["usage"]["completion_tokens"] == 2
    async with served(embedded, says=lambda _: [*hello, dot], reason_rides=True) as it:
        reply = (await it.chat(stop_token_ids=[dot])).json()
        choice = reply["choices"][0]
        assert (choice["message"]["content"], choice["stop_reason"]) == ("Hello", dot)


@pytest.mark.parametrize("stream", [False, True])
@run
async def test_several_answers_differ_by_seed_and_count_the_prompt_once(embedded, stream):
    def says(request):
        return embedded.encode(f"seed {request.sampling_params.seed}", add_special=False)

    async with served(embedded, says=says, cached_tokens=5) as it:
        body = {"n": 3, "seed": 40, "stream_options": {"include_usage": True}}
        texts = ["", "", ""]
        if stream:
            *events, _ = await it.events(**body)
            for event in events:
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
            usage = events[-1]["usage"]
        else:
            reply = (await it.chat(**body)).json()
            for choice in reply["choices"]:
                texts[choice["index"]] = choice["message"]["content"]
            usage = reply["usage"]
        assert texts == ["seed 40", "seed 41", "seed 42"]
        assert usage == {
            "prompt_tokens": 31,
            "completion_tokens": 12,
            "total_tokens": 43,
            "prompt_tokens_details": {"cached_tokens": 5},
        }
        assert len({request.rid for request in it.fake.requests}) == 3


@run
async def test_parameters_reach_the_engine(embedded):
    async with served(embedded) as it:
        await it.chat(
            temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=-1, max_completion_tokens=5,
            max_tokens=7, frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.1,
            logit_bias={"17": -100}, stop_token_ids=[5], ignore_eos=True, min_tokens=2,
            user="me", metadata={"a": "b"}, some_unknown_field=1, n=None, stop=None,
        )  # fmt: skip
        sent = it.fake.requests[0].sampling_params
        assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p) == (0.5, 0.9, 40, 0.1)
        assert (sent.seed, sent.max_new_tokens, sent.min_new_tokens) == (2**63 - 1, 5, 2)
        assert (sent.frequency_penalty, sent.presence_penalty) == (0.5, -0.5)
        assert (sent.repetition_penalty, sent.logit_bias) == (1.1, {"17": -100.0})
        assert (sent.stop_token_ids, sent.ignore_eos, sent.is_normalized) == ({5}, True, True)


@run
async def test_a_priority_travels_beside_a_choice(embedded):
    async with served(embedded) as it:
        await it.chat(priority=3)
        await it.chat(priority=-1, guided_choice=["yes", "no"])
        await it.chat()
        sent = [request.sampling_params.custom_params for request in it.fake.requests]
    assert sent == [
        {"drumline": {"priority": 3}},
        {"drumline": {"priority": -1, "choice": ["yes", "no"]}},
        None,
    ]


@run
async def test_numbers_that_no_wire_holds_are_brought_into_its_range(embedded):
    async with served(embedded) as it:
        assert (await it.chat(top_k=10**30, seed=10**30)).status_code == 200
        sent = it.fake.requests[0].sampling_params
        assert (sent.top_k, sent.seed) == (embedded.vocab_size, 10**30 % 2**63)


@run
async def test_an_answer_without_a_length_declares_none_so_that_no_room_is_set_aside(embedded):
    async with served(embedded) as it:
        await it.chat(temperature=0)
        sent = it.fake.requests[0].sampling_params
        assert sent.max_new_tokens is None
        assert (sent.temperature, sent.top_k) == (1.0, 1)
        await it.complete(prompt="a")
        assert it.fake.requests[1].sampling_params.max_new_tokens == 16, "OpenAI's default there"


@run
async def test_grammars_of_other_engines_fields_reach_the_engine(embedded):
    async with served(embedded) as it:
        await it.chat(regex="a+")
        await it.chat(ebnf='root ::= "a"')
        await it.complete(prompt="a", json_schema={"type": "object"})
        sent = [request.sampling_params for request in it.fake.requests]
    assert [(each.regex, each.ebnf, each.json_schema) for each in sent] == [
        ("a+", None, None),
        (None, 'root ::= "a"', None),
        (None, None, '{"type":"object"}'),
    ]


@pytest.mark.parametrize("stream", [False, True])
@run
async def test_log_probabilities_come_with_their_tokens(embedded, stream):
    async with served(embedded, says="Hi ü") as it:
        body = {"logprobs": True, "top_logprobs": 2}
        if stream:
            *events, _ = await it.events(**body)
            found = [
                entry
                for event in events
                for entry in ((event["choices"][0]["logprobs"] or {}).get("content") or [])
            ]
        else:
            reply = (await it.chat(**body)).json()
            found = reply["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in found).decode() == "Hi ü"
        assert found[0]["token"] == "Hi"
        assert [entry["logprob"] for entry in found] == [-0.5] * len(found)
        assert [top["logprob"] for top in found[0]["top_logprobs"]] == [-0.5, -1.5]
        assert found[0]["top_logprobs"][0]["token"] == "Hi"


@run
async def test_template_variables_can_be_set_but_not_the_templates_own(embedded):
    async with served(embedded) as it:
        await it.chat(chat_template_kwargs={"messages": [], "enable_thinking": False})
        assert len(it.fake.requests[0].input_ids) == 31


@run
async def test_every_name_of_the_model_is_answered_under_its_first(embedded):
    async with served(embedded, names=("tiny", "org/alias")) as it:
        assert (await it.chat(model="org/alias")).json()["model"] == "tiny"
        models = (await it.http.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["tiny", "org/alias"]
        assert models["data"][0]["max_model_len"] == 2048
        assert (await it.http.get("/v1/models/org/alias")).json()["id"] == "org/alias"
        assert (await it.http.get("/v1/models/gpt-4")).status_code == 404
        assert CHAT["messages"]


@run
async def test_a_final_message_is_continued(embedded):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    async with served(embedded) as it:
        await it.chat(messages=messages, continue_final_message=True)
        (request,) = it.fake.requests
        expected = embedded.encode("<|im_start|>assistant\nWell, ", add_special=False)
        assert request.input_ids[-len(expected) :] == expected
        refused = [
            await it.chat(
                messages=messages, continue_final_message=True, add_generation_prompt=True
            ),
            await it.chat(continue_final_message=True),
        ]
        assert [one.json()["error"]["param"] for one in refused] == ["continue_final_message"] * 2


@run
async def test_an_operators_template_stands_in_for_the_models(embedded):
    chat = ChatConfig(chat_template="{{ raise_exception('no ' ~ mood) if mood }}<{{ tone }}>")
    async with served(embedded, chat=chat) as it:
        await it.chat(chat_template_kwargs={"tone": "dry"})
        assert it.fake.requests[0].input_ids == embedded.encode("<dry>", add_special=False)
        refused = await it.chat(chat_template_kwargs={"mood": "fun"})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].endswith("refuses these messages: no fun")
