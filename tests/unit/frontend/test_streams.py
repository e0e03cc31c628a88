"""How streams live and end: silence, failures, clients that leave or read slowly."""

import asyncio
import json

import pytest
from tests.fakes.http import CHAT, events_of, run, served, until

from drumline.frontend.service import Timings

LONG = "word " * 1500


async def raw_request(it, **body):
    """Send a chat request on a bare connection; returns its reader and writer."""
    host, port = it.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**16)
    data = json.dumps(CHAT | body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": False}, {"stream": True, "n": 3}])
@run
async def test_a_client_that_leaves_ends_its_work(embedded, body):
    async with served(embedded, says=LONG, step_s=0.002) as it:
        reader, writer = await raw_request(it, **body)
        await until(lambda: len(it.fake.requests) == body.get("n", 1))
        if body["stream"]:
            await reader.readuntil(b"word")
        writer.close()
        rids = {request.rid for request in it.fake.requests}
        await until(lambda: set(it.fake.aborted) == rids)
        await it.service.live.idle.wait()
        assert it.service.engine.in_flight == 0
        ended = 'drumline:answers_total{model_name="tiny",reason="disconnect"}'
        assert (await it.metrics())[ended] == len(rids)


@run
async def test_a_client_that_leaves_before_the_first_token_ends_its_work(embedded):
    async with served(embedded) as it:
        it.fake.held.set()
        _, writer = await raw_request(it, stream=True)
        await until(lambda: it.fake.requests)
        writer.close()
        await until(lambda: it.fake.aborted)


@run
async def test_a_client_that_reads_slowly_stalls_nobody(embedded):
    async with served(embedded, says="word " * 400) as it:
        # Enough answers to fill every buffer between here and the engine.
        _, writer = await raw_request(it, stream=True, n=100, logprobs=True, top_logprobs=5)
        await until(lambda: len(it.fake.requests) == 100)
        for _ in range(3):
            reply = (await it.chat(max_tokens=20)).json()
            assert reply["usage"]["completion_tokens"] == 20
        writer.close()
        await it.service.live.idle.wait()


@run
async def test_silence_is_filled_with_comments(embedded):
    async with served(embedded, timings=Timings(ping_s=0.05, first_output_s=0.02)) as it:
        it.fake.held.set()
        async with it.streaming() as response:
            assert response.status_code == 200
            text = ""
            async for chunk in response.aiter_text():
                text += chunk
                if text.count(": ping\n\n") >= 3:
                    it.fake.held.clear()
        assert text.index('"role"') < text.index(": ping")
        *events, last = events_of(text)
        assert last == "[DONE]"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("sentinel", [True, False])
@run
async def test_an_engine_that_dies_mid_stream_leaves_a_framed_error(embedded, sentinel):
    async with served(embedded, says=LONG, step_s=0.002) as it:
        async with it.streaming(n=2) as response:
            text = ""
            async for chunk in response.aiter_text():
                text += chunk
                if "word" in text and not it.service.engine.closed.is_set():
                    await asyncio.to_thread(it.fake.close, sentinel)
        *_, error, last = events_of(text)
        assert last == "[DONE]"
        assert error["error"]["code"] == "engine_dead"
        assert error["error"]["type"] == "server_error"
        refused = await it.chat()
        assert refused.status_code == 503
        assert refused.headers["x-should-retry"] == "false"
        assert refused.json()["error"]["code"] == "engine_dead"
        health = await it.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "engine_dead")


@run
async def test_an_engine_that_dies_before_the_answer_is_a_503(embedded):
    async with served(embedded) as it:
        it.fake.held.set()
        waiting = [asyncio.create_task(it.chat(stream=stream)) for stream in (True, False)]
        await until(lambda: len(it.fake.requests) == 2)
        await asyncio.to_thread(it.fake.close)
        for response in await asyncio.gather(*waiting):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_dead"


@pytest.mark.parametrize("details", [None, {"message": "by the operator"}])
@run
async def test_an_answer_the_engine_gives_up_says_so_and_what_it_cost(embedded, details):
    async with served(embedded, refuse=lambda request: details or {"type": "abort"}) as it:
        reason = (details or {}).get("message", "the engine gave the request up")
        *events, usage, last = await it.events(stream_options={"include_usage": True})
        assert last == "[DONE]"
        (choice,) = events[-1]["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", reason)
        assert usage["usage"]["completion_tokens"] == 0
        (choice,) = (await it.chat()).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", reason)


@run
async def test_a_failure_mid_stream_is_framed_and_ends_the_other_answers(embedded):
    def refuse(request):
        return {"status_code": 500, "message": "broke"} if request.rid.endswith("-1") else None

    timings = Timings(first_output_s=0.0)
    async with served(embedded, says=LONG, step_s=0.005, refuse=refuse, timings=timings) as it:
        *_, error, last = await it.events(n=2)
        assert (error["error"]["message"], last) == ("broke", "[DONE]")
        await until(lambda: it.fake.aborted)
        assert it.fake.aborted == [it.fake.requests[0].rid]


@run
async def test_a_burst_comes_out_whole_and_in_order(embedded):
    numbers = " ".join(map(str, range(300)))
    async with served(embedded, says=numbers) as it:
        replies = await asyncio.gather(*(it.events() for _ in range(8)))
        for events in replies:
            deltas = [event["choices"][0]["delta"] for event in events[:-1]]
            assert "".join(delta.get("content", "") for delta in deltas) == numbers
