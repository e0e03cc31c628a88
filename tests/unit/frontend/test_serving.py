"""Health, metrics, draining, and staying answerable under load."""

import asyncio
import gc
import socket

import pytest
from openai import AsyncOpenAI, BadRequestError
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.http import events_of, run, served, until

from drumline.core.config import ServerConfig
from drumline.core.errors import ConfigError
from drumline.frontend.engine_control import Outcome
from drumline.frontend.serve import listen, url_of
from drumline.frontend.service import Timings

LONG = "word " * 1500


@run
async def test_health_tells_a_stall_from_idleness(embedded):
    async with served(embedded, timings=Timings(stall_s=0.2)) as it:
        await it.chat()
        await asyncio.sleep(0.3)
        idle = await it.http.get("/health")
        assert (idle.status_code, idle.json()["status"]) == (200, "ok")
        it.fake.held.set()
        waiting = asyncio.create_task(it.chat())
        await until(lambda: it.fake.requests[1:])
        begun = await it.http.get("/health")
        assert (begun.status_code, begun.json()["in_flight"]) == (200, 1)
        await asyncio.sleep(0.3)
        stalled = await it.http.get("/health")
        assert (stalled.status_code, stalled.json()["status"]) == (503, "stalled")
        assert "1 requests in flight and no output for 0 s" in stalled.json()["reason"]
        assert "rank 0 runs 0, 0 wait, is in round 7 for 1.5 s" in stalled.json()["reason"]
        assert stalled.json()["rounds"] == [7]
        it.fake.lost = True
        stalled = await it.http.get("/health")
        assert (stalled.status_code, stalled.json()["rounds"]) == (503, [])
        it.fake.held.clear()
        await waiting
        assert (await it.http.get("/health")).status_code == 200


@run
async def test_a_client_that_sends_its_body_slowly_is_no_stall(embedded):
    async with served(embedded, timings=Timings(stall_s=0.1)) as it:
        port = int(it.url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        await until(lambda: len(it.service.live))
        await asyncio.sleep(0.3)
        health = await it.http.get("/health")
        assert (health.status_code, health.json()["in_flight"]) == (200, 1)
        writer.close()


@run
async def test_health_answers_while_a_long_prompt_is_tokenized(embedded):
    async with served(embedded, registers={"max_model_len": 1_000_000}) as it:
        loop = asyncio.get_running_loop()
        text = "The quick brown fox jumps over 12 dogs. " * 25_000  # a million characters
        gc.freeze()  # what the tests before this one left would be searched for garbage
        began = loop.time()
        posting = asyncio.create_task(it.complete(prompt=text, max_tokens=1))
        slowest = 0.0
        answers = 0
        while not posting.done():
            asked = loop.time()
            assert (await it.http.get("/health")).status_code == 200
            slowest = max(slowest, loop.time() - asked)
            answers += 1
        assert (await posting).json()["usage"]["prompt_tokens"] > 250_000
        assert answers > 10
        # On the event loop, one of them would have waited for all of the text.
        assert slowest < (loop.time() - began) / 2
        gc.unfreeze()


@run
async def test_metrics_count_what_happened(embedded):
    async with served(embedded, cached_tokens=4) as it:
        await it.chat()
        await it.events()
        await it.chat(n=2, max_tokens=2)
        text = (await it.http.get("/metrics")).text
        assert list(text_string_to_metric_families(text))
        found = await it.metrics()

        def count(name, labels='model_name="tiny"'):
            return found[f"{name}{{{labels}}}"]

        assert count("tokenspeed:num_requests_total") == 4
        assert count("tokenspeed:request_success_total") == 4
        assert count("tokenspeed:generation_tokens_total") == 3 + 3 + 2 + 2
        assert count("tokenspeed:prompt_tokens_total") == 4 * 31
        assert count("tokenspeed:prefix_cache_hits_total") == 16
        assert count("tokenspeed:time_to_first_token_seconds_count") == 4
        assert count("tokenspeed:inter_token_latency_seconds_count") == 2 + 2 + 1 + 1
        assert count("tokenspeed:e2e_request_latency_seconds_count") == 4
        assert count("tokenspeed:request_time_per_output_token_seconds_count") == 4
        assert count("drumline:answers_total", 'model_name="tiny",reason="length"') == 2
        assert count("tokenspeed:num_requests_running", 'dp_rank="0",model_name="tiny"') == 0
        assert count("drumline:kv_pages_total", 'dp_rank="0",model_name="tiny"') == 512
        assert found["drumline:http_requests_in_flight"] == 0
        buckets = [name for name in found if "time_to_first_token_seconds_bucket" in name]
        assert any('le="0.005"' in name for name in buckets)


@run
async def test_draining_lets_what_runs_finish_and_refuses_the_rest(embedded):
    async with served(embedded, says="word " * 100, step_s=0.003, drain_timeout_s=10) as it:
        running = asyncio.create_task(it.events())
        await until(lambda: it.fake.requests)
        it.stop.set()
        await until(lambda: it.service.live.draining)
        refused = await it.chat()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert "retry-after" in refused.headers
        health = await it.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        *events, last = await running
        assert last == "[DONE]"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        await it.serving
        assert not it.fake.aborted


@run
async def test_what_outlasts_the_drain_is_broken_off_with_a_framed_error(embedded):
    async with served(embedded, says=LONG, step_s=0.01, drain_timeout_s=0.2) as it:
        streamed = asyncio.create_task(it.events())
        whole = asyncio.create_task(it.chat())
        await until(lambda: len(it.fake.requests) == 2)
        it.stop.set()
        *_, error, last = await streamed
        assert (error["error"]["code"], last) == ("draining", "[DONE]")
        assert (await whole).status_code == 503
        await it.serving
        rids = {request.rid for request in it.fake.requests}
        await until(lambda: set(it.fake.aborted) == rids)


@run
async def test_a_drain_that_is_cut_short_breaks_off_what_runs_at_once(embedded, caplog):
    async with served(embedded, says=LONG, step_s=0.01, drain_timeout_s=30) as it:
        async with it.streaming() as response:
            it.stop.set()
            await until(lambda: it.service.live.draining)
            it.serving.cancel()
            async with asyncio.timeout(1.5):
                *_, error, last = events_of((await response.aread()).decode())
                await asyncio.wait((it.serving,))
        assert (error["error"]["code"], last) == ("draining", "[DONE]")
    assert not [record for record in caplog.records if record.exc_info]


@run
async def test_idle_connections_do_not_hold_up_the_end(embedded):
    async with served(embedded) as it:
        await it.http.get("/health")  # leaves a connection open
        it.stop.set()
        async with asyncio.timeout(2):
            await it.serving


def test_a_port_in_use_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: cannot bind 127.0.0.1:{port}"):
            listen(ServerConfig(host="127.0.0.1", port=port))


def test_an_address_that_is_none_is_named():
    with pytest.raises(ConfigError, match="--host"):
        listen(ServerConfig(host="no.such.host.invalid", port=0))


def test_a_url_can_be_followed():
    server = ServerConfig(host="127.0.0.1", port=0)
    with listen(server) as listener:
        assert url_of(listener, server) == f"http://127.0.0.1:{listener.getsockname()[1]}"


@run
async def test_the_official_client_is_served(embedded):
    async with (
        served(embedded, names=("tiny",)) as it,
        AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as client,
    ):
        messages = [{"role": "user", "content": "Hi"}]
        reply = await client.chat.completions.create(model="tiny", messages=messages, n=2)
        assert [choice.message.content for choice in reply.choices] == ["Hello there!"] * 2
        assert reply.usage.prompt_tokens_details.cached_tokens == 0
        text, usage = "", None
        async with await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        ) as stream:
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage or usage
        assert (text, usage.completion_tokens) == ("Hello there!", 3)
        completion = await client.completions.create(
            model="tiny", prompt="Hi", stop=" there", logprobs=1
        )
        assert completion.choices[0].text == "Hello"
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=[])
        assert refused.value.param == "messages"
        assert refused.value.request_id


@run
async def test_an_operation_that_runs_is_finished_by_a_drain_or_answered_at_its_end(embedded):
    answers = {"pause_scheduler": None}

    def on_call(method, *args):
        return answers.get(method, (True, ""))

    async with served(embedded, on_call=on_call, drain_timeout_s=0.5) as it:
        asking = asyncio.create_task(it.http.post("/pause"))
        await until(lambda: it.fake.calls)
        it.stop.set()
        reply = await asking
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
    pending = asyncio.Event()
    async with served(embedded, drain_timeout_s=10) as it:

        async def flush():
            await pending.wait()
            return Outcome(True, "flushed")

        it.service.control.flush = flush
        asking = asyncio.create_task(it.http.post("/flush_cache"))
        await asyncio.sleep(0.2)
        it.stop.set()
        await asyncio.sleep(0.2)
        pending.set()
        assert (await asking).json() == {"success": True, "message": "flushed"}
