"""Routes that users of other engines know: /generate, tokens, aborts, state, probes."""

import asyncio
import json

import msgspec
import pytest
from tests.fakes.http import CHAT, run, served, until

from drumline.core.config import Config, ModelConfig, ServerConfig
from drumline.frontend.service import Timings

LONG = "word " * 300
GREETING = "Hello there!"


async def generate(it, **body):
    return await it.http.post("/generate", json=body)


# /generate


@run
async def test_a_text_is_continued_with_its_ids_and_what_it_cost(embedded):
    async with served(embedded, cached_tokens=2) as it:
        reply = (await generate(it, text="Say hello", rid="mine")).json()
        meta = reply.pop("meta_info")
        ids = embedded.encode(GREETING, add_special=False)
        assert reply == {"text": GREETING, "output_ids": ids}
        assert meta == {
            "id": "mine",
            "finish_reason": {"type": "stop"},
            "prompt_tokens": 2,
            "completion_tokens": len(ids),
            "cached_tokens": 2,
            "weight_version": "default",
        }
        (request,) = it.fake.requests
        assert request.sampling_params.max_new_tokens == 128


@run
async def test_lists_of_texts_or_ids_are_answered_by_lists(embedded):
    async with served(embedded) as it:
        for prompt, size in (
            ({"text": ["a", "b b"]}, 2),
            ({"input_ids": [[5, 6], [7]]}, 2),
            ({"text": ["a"]}, 1),
            ({"input_ids": [[5]]}, 1),
        ):
            replies = (await generate(it, **prompt)).json()
            assert [reply["text"] for reply in replies] == [GREETING] * size
        one = (await generate(it, input_ids=[5, 6, 7])).json()
        assert one["meta_info"]["prompt_tokens"] == 3
        assert it.fake.requests[-1].input_ids == [5, 6, 7]
        two = (await generate(it, text="a", sampling_params={"n": 2})).json()
        assert [reply["text"] for reply in two] == [GREETING] * 2


@run
async def test_a_stream_holds_everything_so_far_in_each_event(embedded):
    async with served(embedded) as it:
        *events, last = await it.events("/generate", text="a", rid="mine")
        assert last == "[DONE]"
        texts = [event["text"] for event in events]
        assert texts[-1] == GREETING
        assert all(GREETING.startswith(text) for text in texts)
        sizes = [len(event["output_ids"]) for event in events]
        assert (sizes, sizes[-1]) == (sorted(sizes), 3)
        *running, ended = [event["meta_info"]["finish_reason"] for event in events]
        assert (set(map(str, running)), ended) == ({"None"}, {"type": "stop"})
        assert {event["meta_info"]["id"] for event in events} == {"mine"}


@run
async def test_streamed_lists_say_which_prompt_an_event_is_of(embedded):
    async with served(embedded) as it:
        *events, _ = await it.events("/generate", text=["a", "b"])
        ended = {event["index"]: event for event in events if event["meta_info"]["finish_reason"]}
        assert {index: event["text"] for index, event in ended.items()} == {
            0: GREETING, 1: GREETING,
        }  # fmt: skip


@run
async def test_sampling_parameters_reach_the_engine_under_their_own_names(embedded):
    async with served(embedded) as it:
        sampling = {
            "max_new_tokens": 7, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 8,
            "min_p": 0.1, "frequency_penalty": 0.1, "presence_penalty": 0.2,
            "repetition_penalty": 1.1, "stop_token_ids": [3], "ignore_eos": True,
            "sampling_seed": 11, "regex": "a+", "logit_bias": {"7": 1.5},
        }  # fmt: skip
        assert (await generate(it, text="a", sampling_params=sampling)).status_code == 200
        sent = msgspec.structs.asdict(it.fake.requests[0].sampling_params)
        assert sent["seed"] == 11
        assert sent["stop_token_ids"] == {3}
        for name, value in sampling.items():
            if name not in ("sampling_seed", "stop_token_ids"):
                assert sent[name] == value, name


@run
async def test_log_probabilities_come_as_triples(embedded):
    async with served(embedded) as it:
        body = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
        meta = (await generate(it, text="a", **body)).json()["meta_info"]
        ids = embedded.encode(GREETING, add_special=False)
        told = meta["output_token_logprobs"]
        assert [(value, id_) for value, id_, _ in told] == [(-0.5, id_) for id_ in ids]
        assert "".join(text for *_, text in told) == GREETING
        assert meta["output_top_logprobs"][0] == [
            [-0.5, ids[0], "Hello"],
            [-1.5, ids[0] + 1, embedded.piece(ids[0] + 1).decode()],
        ]
        assert meta["input_token_logprobs"] == []
        bare = (await generate(it, text="a", return_logprob=True)).json()["meta_info"]
        assert bare["output_token_logprobs"][0] == [-0.5, ids[0], None]
        assert "output_top_logprobs" not in bare


@run
async def test_tokens_asked_for_by_name_are_told_at_every_place_however_likely(embedded):
    ids = embedded.encode(GREETING, add_special=False)
    answer = {"return_logprob": True, "token_ids_logprob": [7, 3]}
    async with served(embedded) as it:
        meta = (await generate(it, input_ids=[5, 6], **answer)).json()["meta_info"]
        assert meta["output_token_ids_logprobs"] == [[[-8.0, 7, None], [-8.0, 3, None]]] * len(ids)
        assert meta["input_token_ids_logprobs"] == []
        assert "output_top_logprobs" not in meta
        # Beside the likeliest, of the prompt too, and with their texts.
        more = {"top_logprobs_num": 1, "logprob_start_len": 0, "return_text_in_logprobs": True}
        meta = (await generate(it, input_ids=[5, 6], **answer, **more)).json()["meta_info"]
        seven, three = (embedded.piece(id_).decode() for id_ in (7, 3))
        told = [[-9.0, 7, seven], [-9.0, 3, three]]
        assert meta["input_token_ids_logprobs"] == [None, told]
        assert [len(likely) for likely in meta["output_top_logprobs"]] == [1] * len(ids)
        assert meta["output_top_logprobs"][0][0][1] == ids[0]
        *_, last, _ = await it.events("/generate", input_ids=[5, 6], **answer)
        told = last["meta_info"]["output_token_ids_logprobs"]
        assert told == [[[-8.0, 7, None], [-8.0, 3, None]]] * len(ids)
        # Without `return_logprob` nothing is told, as elsewhere.
        body = {"input_ids": [5, 6], "token_ids_logprob": [7]}
        assert "output_token_ids_logprobs" not in (await generate(it, **body)).json()["meta_info"]
        assert it.fake.requests[-1].token_ids_logprob is None


@run
async def test_each_prompt_of_a_list_may_name_tokens_of_its_own(embedded):
    async with served(embedded) as it:

        def named(reply):
            return [
                [id_ for _, id_, _ in each["meta_info"]["output_token_ids_logprobs"][0]]
                for each in reply.json()
            ]

        body = {"input_ids": [[5], [6, 7]], "return_logprob": True}
        assert named(await generate(it, **body, token_ids_logprob=[7, 3])) == [[7, 3], [7, 3]]
        assert named(await generate(it, **body, token_ids_logprob=[[7], [2, 4]])) == [[7], [2, 4]]
        each = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
        body["sampling_params"] = each
        reply = await generate(it, **body, token_ids_logprob=[[7], []])
        assert named(reply) == [[7], []]
        assert [len(one["output_ids"]) for one in reply.json()] == [1, 2]
        body["sampling_params"] = {"n": 2, "max_new_tokens": 1}
        reply = await generate(it, **body, token_ids_logprob=[[7], [3]])
        assert named(reply) == [[7], [7], [3], [3]]
        sent = {tuple(one.input_ids): one.token_ids_logprob for one in it.fake.requests[-4:]}
        assert sent == {(5,): [7], (6, 7): [3]}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "text", "invalid_combination"),
        ({"text": "a", "token_ids_logprob": [10**6]}, "token_ids_logprob", "invalid_token_id"),
        ({"text": "a", "token_ids_logprob": [-1]}, "token_ids_logprob", "invalid_token_id"),
        ({"text": "a", "token_ids_logprob": [1, [2]]}, "token_ids_logprob", "invalid_type"),
        ({"text": "a", "token_ids_logprob": [[1], [2]]}, "token_ids_logprob", "invalid_value"),
        ({"text": ["a", "b"], "token_ids_logprob": [[1]]}, "token_ids_logprob", "invalid_value"),
        ({"text": "a", "token_ids_logprob": [1] * 129}, "token_ids_logprob",
         "array_above_max_length"),
        ({"text": "a", "input_ids": [1]}, "text", "invalid_combination"),
        ({"text": []}, "text", "array_above_max_length"),
        ({"input_ids": [1, [2]]}, "input_ids", "invalid_type"),
        ({"input_ids": [10**6]}, "input_ids", "invalid_token_id"),
        ({"input_ids": []}, "input_ids", "empty_prompt"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params", "invalid_value"),
        ({"text": "a", "sampling_params": 7}, None, "invalid_type"),
        ({"text": "a", "sampling_params": {"top_p": 2}}, "top_p", "decimal_above_max_value"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens",
         "integer_below_min_value"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "stop_regex",
         "unsupported_parameter"),
        ({"text": "a", "lora_path": "x"}, "lora_path", "unsupported_parameter"),
        ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num", "integer_above_max_value"),
        ({"text": "a", "rid": "a b"}, "rid", "invalid_request_id"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid", "invalid_value"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "invalid_value"),
    ],
)  # fmt: skip
@run
async def test_what_cannot_be_generated_is_refused_by_name(embedded, body, param, code):
    async with served(embedded) as it:
        refused = await generate(it, **body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, param, code)
        assert not it.fake.requests


# Ids and aborts


@pytest.mark.parametrize(
    ("path", "body", "headers", "names"),
    [
        ("/generate", {"text": "a", "rid": "mine"}, {}, ["mine"]),
        ("/v1/chat/completions", CHAT, {"X-Request-Id": "mine"}, ["mine", "chatcmpl-mine"]),
        ("/v1/completions", {"prompt": "a", "request_id": "mine"}, {}, ["mine", "cmpl-mine"]),
        ("/v1/completions", {"prompt": "a", "rid": "mine"}, {"X-Request-Id": "b"}, ["mine", "b"]),
    ],
)
@run
async def test_a_request_is_ended_by_any_of_its_ids(embedded, path, body, headers, names):
    async with served(embedded, says=LONG, step_s=0.01) as it:
        for name in names:
            arrived = len(it.fake.requests)
            posting = asyncio.create_task(it.http.post(path, json=body, headers=headers))
            await until(lambda arrived=arrived: len(it.fake.requests) > arrived)
            aborted = await it.http.post("/abort_request", json={"rid": name})
            assert aborted.json() == {"success": True, "aborted": 1}
            reply = (await posting).json()
            ended = reply.get("meta_info") or reply["choices"][0]
            assert "abort" in json.dumps(ended["finish_reason"])
        assert (await posting).headers["x-request-id"] == headers.get("X-Request-Id", "mine")
        again = await it.http.post("/abort_request", json={"rid": names[0]})
        assert again.json() == {"success": True, "aborted": 0}


@run
async def test_one_prompt_of_several_is_ended_by_its_own_id(embedded):
    async with served(embedded, says=LONG, step_s=0.005) as it:
        posting = asyncio.create_task(
            generate(it, text=["a", "b", "c"], rid=["x", "y", "z"],
                     sampling_params={"max_new_tokens": 30})
        )  # fmt: skip
        await until(lambda: len(it.fake.requests) == 3)
        await it.http.post("/abort_requests", json={"request_ids": ["y", "nobody"]})
        kinds = [one["meta_info"]["finish_reason"]["type"] for one in (await posting).json()]
        assert kinds == ["length", "abort", "length"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/abort_request", {"abort_all": True}), ("/abort_requests", {}),
     ("/abort_requests", {"request_ids": []})],
)  # fmt: skip
@run
async def test_all_requests_are_ended_together_streams_too(embedded, path, body):
    async with served(embedded, says=LONG, step_s=0.01) as it:
        posts = [asyncio.create_task(it.chat()), asyncio.create_task(it.events(n=2))]
        await until(lambda: len(it.fake.requests) == 3)
        aborted = await it.http.post(path, json=body)
        assert aborted.json() == {"success": True, "aborted": 3}
        whole, (*events, last) = [await post for post in posts]
        assert whole.json()["choices"][0]["finish_reason"] == "abort"
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert (reasons.count("abort"), last) == (2, "[DONE]")
        nothing = await it.http.post("/abort_request", json={})
        assert nothing.status_code == 400


@run
async def test_an_abort_before_the_body_has_come_is_kept_for_it(embedded):
    async with served(embedded, says=LONG, step_s=0.01) as it:
        host, port = it.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt":"a"}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: early\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        await until(lambda: len(it.service.live))
        aborted = await it.http.post("/abort_request", json={"rid": "early"})
        assert aborted.json()["aborted"] == 1
        writer.write(body)
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b'"finish_reason":"abort"')
        writer.close()


@run
async def test_an_id_in_flight_is_not_given_twice(embedded):
    async with served(embedded) as it:
        it.fake.held.set()
        first = asyncio.create_task(generate(it, text="a", rid="mine"))
        await until(lambda: it.fake.requests)
        second = await generate(it, text="a", rid="mine")
        assert (second.status_code, second.json()["error"]["code"]) == (409, "request_id_in_use")
        it.fake.held.clear()
        assert (await first).status_code == 200
        assert (await generate(it, text="a", rid="mine")).status_code == 200


@run
async def test_aborting_others_requests_is_the_operators(embedded):
    server = ServerConfig(host="127.0.0.1", port=0, api_key=("c",), admin_api_key="o")
    async with served(embedded, server=server) as it:
        for key, status in (("c", 403), ("o", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"abort_all": True}
            reply = await it.http.post("/abort_request", json=body, headers=headers)
            assert reply.status_code == status


# Tokens


@pytest.mark.parametrize("prefix", ["", "/v1"])
@run
async def test_text_becomes_ids_and_ids_become_text(embedded, prefix):
    async with served(embedded) as it:

        async def post(path, **body):
            return (await it.http.post(prefix + path, json=body)).json()

        ids = embedded.encode("héllo wörld", add_special=True)
        one = await post("/tokenize", prompt="héllo wörld", return_token_strs=True, model="tiny")
        assert (one["tokens"], one["count"], one["max_model_len"]) == (ids, len(ids), 2048)
        assert len(one["token_strs"]) == len(ids)
        several = await post("/tokenize", prompt=["héllo wörld", ""], add_special_tokens=False)
        assert several["tokens"] == [embedded.encode("héllo wörld", add_special=False), []]
        assert several["count"] == [len(several["tokens"][0]), 0]
        back = await post("/detokenize", tokens=ids)
        assert back == {"prompt": "héllo wörld", "text": "héllo wörld"}
        lists = await post("/detokenize", tokens=[ids, []])
        assert lists["text"] == ["héllo wörld", ""]


@run
async def test_a_conversation_becomes_the_ids_that_its_chat_would_send(embedded):
    async with served(embedded) as it:
        await it.chat()
        told = (await it.http.post("/tokenize", json=CHAT)).json()
        assert told["tokens"] == it.fake.requests[0].input_ids
        assert told["count"] == len(told["tokens"])


@run
async def test_special_tokens_stand_in_the_text_unless_told_not_to(embedded):
    async with served(embedded) as it:
        ids = embedded.encode("<|im_start|>a", add_special=False)
        kept = (await it.http.post("/detokenize", json={"tokens": ids})).json()
        assert kept["text"] == "<|im_start|>a"
        body = {"tokens": ids, "skip_special_tokens": True}
        assert (await it.http.post("/detokenize", json=body)).json()["text"] == "a"


@run
async def test_a_text_longer_than_the_context_is_counted_all_the_same(embedded):
    async with served(embedded) as it:
        told = (await it.http.post("/tokenize", json={"prompt": "word " * 9000})).json()
        assert told["count"] > 9000
        body = {"tokens": told["tokens"]}
        back = (await it.http.post("/detokenize", json=body)).json()
        assert back["text"] == "word " * 9000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a"} | CHAT, "prompt"),
        ("/tokenize", {"prompt": []}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)
@run
async def test_tokens_that_are_none_are_refused_by_name(embedded, path, body, param):
    async with served(embedded) as it:
        refused = await it.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


# State and probes


@run
async def test_server_info_has_every_setting_and_no_key(embedded):
    server = ServerConfig(host="127.0.0.1", port=0, api_key=("hush",), admin_api_key="hush")
    async with served(embedded, server=server) as it:
        it.service.config = Config(server=server, model=ModelConfig(model="/here"))
        headers = {"Authorization": "Bearer hush"}
        assert (await it.http.get("/server_info")).status_code == 401
        for path in ("/server_info", "/get_server_info"):
            text = (await it.http.get(path, headers=headers)).text
            info = json.loads(text)
            assert "hush" not in text
            assert (info["model"], info["max_num_seqs"]) == ("/here", 160)
            assert info["resolved"]["context_tokens"] == 2048
            assert info["resolved"]["kv_cache_dtype"] == "int8"
            assert info["resolved"]["backend"] == "fake kernels"
            assert info["resolved"]["device"] == "fake device"
            assert info["engine"]["instance_id"] == "fake"


@run
async def test_loads_are_told_rank_by_rank_and_summed(embedded):
    async with served(embedded, engines=2) as it:
        it.fakes[0].others = (3, 1, 128)
        it.fake.mute.clear()
        await it.chat(data_parallel_rank=0)
        await it.chat(data_parallel_rank=1)
        loads = (await it.http.get("/v1/loads")).json()
        assert loads["dp_rank_count"] == 2
        first, second = loads["loads"]
        assert (first["num_running_reqs"], first["num_waiting_reqs"]) == (3, 1)
        assert (first["num_used_pages"], first["token_usage"]) == (128, 0.25)
        assert second["num_running_reqs"] == 0
        assert loads["aggregate"]["total_reqs"] == 4


@pytest.mark.parametrize("longest", [512 * 16, 512 * 16 - 17])
@run
async def test_loads_in_tokens_count_whole_pages_however_long_a_request_may_be(embedded, longest):
    async with served(embedded, registers={"kv_cache_size_tokens": longest}) as it:
        it.fake.others = (1, 0, 128)
        await it.chat()
        (load,) = (await it.http.get("/v1/loads")).json()["loads"]
        assert (load["num_used_tokens"], load["max_total_num_tokens"]) == (128 * 16, 512 * 16)


@run
async def test_a_generated_token_of_every_engine_is_a_probe(embedded):
    async with served(embedded, engines=2) as it:
        probe = await it.http.get("/health_generate")
        assert (probe.status_code, probe.json()) == (200, {"status": "ok"})
        for fake in it.fakes:
            (request,) = fake.requests
            assert request.sampling_params.max_new_tokens == 1
            assert request.rid.startswith("health-")


@run
async def test_an_engine_that_makes_no_token_fails_the_probe_by_its_rank(embedded):
    async with served(embedded, engines=2, timings=Timings(probe_s=0.2)) as it:
        it.fakes[1].held.set()
        probe = await it.http.get("/health_generate")
        assert probe.status_code == 503
        assert probe.json()["reason"] == "rank 1 made no token within 0.2 s"
        await until(lambda: it.fakes[1].aborted)
        ready = await it.http.get("/readiness")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")


@pytest.mark.parametrize(("status", "answer"), [(429, 200), (500, 503)])
@run
async def test_a_full_queue_is_no_failure_of_the_probe(embedded, status, answer):
    details = {"status_code": status, "message": "no"}
    async with served(embedded, refuse=lambda _: details) as it:
        assert (await it.http.get("/health_generate")).status_code == answer


@run
async def test_probes_tell_a_dead_engine_from_a_dead_server(embedded):
    async with served(embedded) as it:
        for path in ("/ready", "/readiness"):
            assert (await it.http.get(path)).json() == {"status": "ready", "models": ["tiny"]}
        await asyncio.to_thread(it.fake.close)
        await it.service.engine.closed.wait()
        for path in ("/ready", "/readiness", "/health", "/health_generate"):
            dead = await it.http.get(path)
            assert (dead.status_code, bool(dead.json()["reason"])) == (503, True)
        for path in ("/liveness", "/ping"):
            assert (await it.http.get(path)).json() == {"status": "ok"}


@run
async def test_the_routes_are_documented_without_the_net(embedded):
    async with served(embedded) as it:
        document = (await it.http.get("/openapi.json")).json()
        assert document["openapi"].startswith("3.1")
        assert document["paths"]["/generate"]["post"]["security"]
        assert "security" not in document["paths"]["/health"]["get"]
        schema = document["components"]["schemas"]["ChatRequest"]
        assert schema["required"] == ["messages"]
        assert "temperature" in schema["properties"]
        page = await it.http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        for path in document["paths"]:
            assert path.split("/{")[0] in page.text
        assert "http://" not in page.text
        assert "https://" not in page.text
        assert "<script" not in page.text


@run
async def test_a_list_of_prompts_may_have_sampling_parameters_of_its_own_for_each(embedded):
    async with served(embedded) as server:
        each = [{"max_new_tokens": 2}, {"max_new_tokens": 3, "stop": "there", "temperature": 0}]
        body = {"input_ids": [[5], [6, 7]], "sampling_params": each, "return_logprob": True}
        one, other = (await server.http.post("/generate", json=body)).json()
        assert (len(one["output_ids"]), other["text"]) == (2, "Hello ")
        assert other["meta_info"]["finish_reason"] == {"type": "stop", "matched": "there"}
        assert [reply["meta_info"]["prompt_tokens"] for reply in (one, other)] == [1, 2]
        sent = {tuple(r.input_ids): r.sampling_params for r in server.fake.requests}
        assert (sent[5,].max_new_tokens, sent[6, 7].max_new_tokens) == (2, 3)
        assert (sent[5,].top_k, sent[6, 7].top_k) != (1, 1)
        assert sent[6, 7].top_k == 1
        two = [{"n": 2, "max_new_tokens": 1}, {"n": 2, "max_new_tokens": 4}]
        replies = (await server.http.post("/generate", json=body | {"sampling_params": two})).json()
        assert [len(reply["output_ids"]) for reply in replies] == [1, 1, 3, 3]


@run
async def test_lists_of_sampling_parameters_that_do_not_fit_are_refused(embedded):
    async with served(embedded) as server:
        for each, code in (
            ([], "empty_array"),
            ([{}], "invalid_value"),
            ([{"n": 1}, {"n": 2}], "invalid_combination"),
            ([{}, {"temperature": 9}], "decimal_above_max_value"),
            ([{}, {"tfs_z": 0.5}], "unsupported_parameter"),
            ([{}, 3], "invalid_type"),
        ):
            body = {"text": ["a", "b"], "sampling_params": each}
            reply = await server.http.post("/generate", json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, code), each
