"""What users of other servers complained of, and must not meet here.

One test each for what no other file covers; `tests/architecture/test_promises.py` says where
every complaint is tested.
"""

import asyncio
import gc
import json

import pytest
from prometheus_client import Counter
from tests.fakes.http import CHAT, events_of, run, served, until

from drumline.client.stream import Stream
from drumline.core.config import ServerConfig
from drumline.frontend.generation import Generation
from drumline.frontend.openai.completions import CompletionCall
from drumline.frontend.web.reply import Reply


@pytest.mark.parametrize("stream", [False, True])
@run
async def test_a_closed_connection_ends_its_work_whether_it_streams_or_not(embedded, stream):
    async with served(embedded, says=lambda _: [5] * 2000, step_s=0.005) as it:
        body = {"prompt": [1], "max_tokens": 2000, "ignore_eos": True, "stream": stream}
        asking = asyncio.create_task(it.complete(**body))
        await until(lambda: it.fake.requests)
        asking.cancel()
        await until(lambda: it.fake.aborted)
        assert it.fake.aborted == [it.fake.requests[0].rid]


@run
async def test_of_two_posts_with_one_id_at_the_same_time_one_is_answered_and_one_refused(embedded):
    async with served(embedded) as it:
        headers = {"x-request-id": "same"}
        both = await asyncio.gather(*(it.chat(headers=headers) for _ in range(2)))
        assert sorted(reply.status_code for reply in both) == [200, 409]


@run
async def test_every_answer_is_counted_once_however_it_ends(embedded):
    long = {"prompt": [1], "max_tokens": 900, "ignore_eos": True}

    def says(request):
        return [5] * 900 if request.input_ids == [1] else embedded.encode("Hi", add_special=False)

    def refuse(request):
        return {"message": "no", "status_code": 500} if request.input_ids == [9] else None

    async with served(embedded, says=says, step_s=0.002, refuse=refuse) as it:
        assert (await it.complete(prompt=[2])).status_code == 200  # stop
        assert (await it.complete(prompt=[2], max_tokens=1)).status_code == 200  # length
        assert (await it.complete(prompt=[9])).status_code == 500  # error
        aborted = asyncio.create_task(it.complete(**long, rid="a"))
        left = asyncio.create_task(it.complete(**long, rid="b"))
        await until(lambda: len(it.fake.requests) == 5)
        await it.http.post("/abort_request", json={"rid": "a"})
        await aborted
        left.cancel()
        await until(lambda: len(it.fake.aborted) == 2)
        told = await it.metrics()
        ends = {
            name.split('reason="')[1].rstrip('"}'): value
            for name, value in told.items()
            if name.startswith("drumline:answers_total")
        }
        assert ends == {"stop": 1, "length": 1, "error": 1, "abort": 1, "disconnect": 1}
        assert told['tokenspeed:num_requests_total{model_name="tiny"}'] == sum(ends.values())
        tokens = told['tokenspeed:generation_tokens_total{model_name="tiny"}']
        assert tokens >= (await aborted).json()["usage"]["completion_tokens"]


@run
async def test_figures_that_make_no_sense_fail_no_request(embedded):
    async with served(embedded, cached_tokens=-5) as it:
        reply = await it.chat()
        assert reply.json()["choices"][0]["message"]["content"] == "Hello there!"
        assert (await it.metrics())['tokenspeed:prefix_cache_hits_total{model_name="tiny"}'] == 0
        with pytest.raises(ValueError, match="increment"):  # what the library would have said
            Counter("some", "", registry=None).inc(-5)


@run
async def test_nothing_of_a_request_stays_behind(embedded):
    async with served(embedded) as it:
        for _ in range(100):
            await it.complete(prompt="Hi", max_tokens=2)
            await it.events("/v1/completions", prompt="Hi", max_tokens=2)
        gc.collect()
        kinds = (Generation, Stream, Reply, CompletionCall)
        # Not isinstance: some libraries' objects say of themselves that they are deprecated.
        left = [one for one in gc.get_objects() if type(one) in kinds]
        assert len(left) <= 8, left[:10]


@run
async def test_empty_prompts_have_a_documented_result(embedded):
    async with served(embedded) as it:
        for prompt, status in (("", 400), ([], 400), ([""], 400), ([[]], 400), ("a", 200)):
            reply = await it.complete(prompt=prompt)
            assert reply.status_code == status, prompt
            if status != 200:
                assert reply.json()["error"]["param"] == "prompt"
        assert len(it.fake.requests) == 1


@run
async def test_a_bias_beyond_the_vocabulary_is_refused_with_the_id(embedded):
    async with served(embedded) as it:
        reply = await it.complete(prompt="a", logit_bias={"99999999": 1})
        assert reply.status_code == 400
        assert "99999999" in reply.json()["error"]["message"]
        assert (await it.complete(prompt="a")).status_code == 200


@run
async def test_health_answers_while_twenty_megabytes_are_read(embedded):
    async with served(embedded, server=ServerConfig(port=0)) as it:
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(it.complete(prompt="word " * 4_000_000))
        late = []
        while not sending.done():
            began = loop.time()
            assert (await it.http.get("/health")).status_code == 200
            late.append(loop.time() - began)
            await asyncio.sleep(0.01)
        assert (await sending).json()["error"]["code"] == "context_length_exceeded"
        late.sort()
        # The client shares this loop, and so takes its part of the time.
        assert late[len(late) // 2] < 0.5


@run
async def test_a_stream_that_the_server_ends_says_why_and_what_it_cost(embedded):
    async with served(embedded, says=lambda _: [5] * 900, step_s=0.005) as it:
        body = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 900}
        stream = asyncio.create_task(
            it.http.post("/v1/chat/completions", json=CHAT | body | {"rid": "mine"})
        )
        await until(lambda: it.fake.requests)
        await asyncio.sleep(0.05)
        await it.http.post("/abort_request", json={"rid": "mine"})
        *events, usage, end = events_of((await stream).text)
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        assert usage["usage"]["completion_tokens"] > 0
        assert end == "[DONE]"
        assert json.dumps(events)
