"""Several HTTP workers and the one link they share, with a scripted engine."""

import asyncio

import msgspec
import pytest
from tests.fakes.http import events_of, run, until
from tests.fakes.workers import served_by_workers

from drumline.client.stream import Delta
from drumline.frontend.engine_control import Control, EngineControl
from drumline.frontend.service import Timings
from drumline.frontend.workers.channel import Channel
from drumline.frontend.workers.counted import Family, kept, summed
from drumline.frontend.workers.hub import STEERING
from drumline.frontend.workers.link import SharedControl
from drumline.frontend.workers.messages import Gone, Rows, decode_from_owner

LONG = {"prompt": [1], "max_tokens": 500, "ignore_eos": True}


@run
async def test_every_worker_answers_by_the_one_link(embedded):
    async with served_by_workers(embedded) as server:
        replies = await asyncio.gather(
            *(worker.complete(prompt="Hi") for worker in server.workers for _ in range(4))
        )
        assert {reply.json()["choices"][0]["text"] for reply in replies} == {"Hello there!"}
        assert len(server.fake.requests) == 8


@run
async def test_a_stream_through_a_worker_is_the_one_of_a_lone_server(embedded):
    async with served_by_workers(embedded) as server:
        reply = await server.workers[1].complete(
            prompt="Hi", stream=True, logprobs=2, stream_options={"include_usage": True}
        )
        *events, usage, end = events_of(reply.text)
        text = "".join(event["choices"][0]["text"] for event in events)
        told = [p for e in events for p in (e["choices"][0]["logprobs"] or {}).get("tokens", ())]
        assert (text, "".join(told), end) == ("Hello there!", "Hello there!", "[DONE]")
        assert usage["usage"]["completion_tokens"] == len(told)


@run
async def test_an_id_in_flight_at_one_worker_is_refused_by_another_and_free_behind_it(embedded):
    async with served_by_workers(embedded, step_s=0.01) as server:
        one, other = server.workers
        for name, asked in (
            ({"headers": {"x-request-id": "mine"}}, {}),
            ({"rid": "mine"}, {"rid": "mine"}),
        ):
            server.fake.held.set()
            server.fake.requests.clear()
            first = asyncio.create_task(one.complete(prompt="Hi", **name))
            await until(lambda: server.fake.requests)
            refused = await other.complete(prompt="Hi", **(name | asked))
            assert refused.status_code == 409, refused.text
            assert refused.json()["error"]["code"] == "request_id_in_use"
            server.fake.held.clear()
            assert (await first).status_code == 200
            assert (await other.complete(prompt="Hi", **name)).status_code == 200


@run
async def test_an_id_of_embeddings_is_one_of_all_workers_and_of_all_routes(embedded):
    async with served_by_workers(embedded, step_s=0.01) as server:
        one, other = server.workers
        server.fake.held.set()
        mine = {"headers": {"x-request-id": "mine"}}
        body = {"input": [5, 6]}
        first = asyncio.create_task(one.http.post("/v1/embeddings", json=body, **mine))
        await until(lambda: server.fake.requests)
        refused = await other.http.post("/v1/embeddings", json=body, **mine)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_id_in_use")
        assert (await other.complete(prompt="Hi", **mine)).status_code == 409
        unnamed = asyncio.create_task(other.http.post("/v1/embeddings", json=body))
        server.fake.held.clear()
        assert [(await each).status_code for each in (first, unnamed)] == [200, 200]
        again = await other.http.post("/v1/embeddings", json=body, **mine)
        assert again.status_code == 200


@run
async def test_a_request_is_aborted_from_any_worker_by_any_of_its_ids(embedded):
    async with served_by_workers(embedded, says=lambda _: [1] * 500, step_s=0.01) as server:
        one, other = server.workers
        running = asyncio.create_task(one.complete(**LONG, rid="mine"))
        await until(lambda: server.fake.requests)
        told = await other.http.post("/abort_request", json={"rid": "mine"})
        assert told.json() == {"success": True, "aborted": 1}
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"
        both = [asyncio.create_task(worker.complete(**LONG)) for worker in server.workers]
        await until(lambda: len(server.fake.requests) == 3)
        told = await other.http.post("/abort_request", json={"abort_all": True})
        assert told.json()["aborted"] == 2
        ends = [(await each).json()["choices"][0]["finish_reason"] for each in both]
        assert ends == ["abort", "abort"]


@run
async def test_places_are_counted_over_all_workers(embedded):
    async with served_by_workers(embedded, most=2) as server:
        server.fake.held.set()
        first = [asyncio.create_task(worker.complete(prompt="Hi")) for worker in server.workers]
        await until(lambda: len(server.fake.requests) == 2)
        for worker in server.workers:
            refused = await worker.complete(prompt="Hi")
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
        server.fake.held.clear()
        await asyncio.gather(*first)
        assert (await server.workers[0].complete(prompt="Hi")).status_code == 200


@run
async def test_the_requests_of_a_worker_that_is_gone_are_aborted_and_nobody_elses(embedded):
    async with served_by_workers(embedded, says=lambda _: [1] * 500, step_s=0.01, most=2) as server:
        one, other = server.workers
        lost = asyncio.create_task(one.complete(**LONG, rid="lost"))
        stays = asyncio.create_task(other.complete(**LONG, rid="stays"))
        await until(lambda: len(server.fake.requests) == 2)
        rid = next(r.rid for r in server.fake.requests if r.rid.startswith("lost"))
        one.dies()
        await until(lambda: server.fake.aborted == [rid])
        assert (await lost).status_code == 503
        # Its names and places are free again, and it is no part of anything any more.
        again = await other.complete(prompt=[1], max_tokens=2, rid="lost")
        assert again.status_code == 200
        assert "_total" in (await other.http.get("/metrics")).text
        assert not stays.done()
        await other.http.post("/abort", json={"rid": "stays"})
        assert (await stays).json()["choices"][0]["finish_reason"] == "abort"


@run
async def test_metrics_are_those_of_all_workers_also_of_one_that_ended(embedded):
    async def total(worker, name):
        lines = (await worker.http.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    async with served_by_workers(embedded) as server:
        one, other = server.workers
        for worker in (one, other, other):
            await worker.complete(prompt="Hi")
        assert await total(one, "tokenspeed:num_requests_total") == 3
        assert await total(other, "tokenspeed:time_to_first_token_seconds_count") == 3
        assert await total(one, "drumline:http_requests_in_flight") == 0
        assert await total(one, "tokenspeed:num_requests_running") == 0
        other.link._answer = lambda *_: other.dies()
        assert await total(one, "tokenspeed:num_requests_total") == 3, "once, as it is asked"
        assert len(server.hub._workers) == 1
        await one.complete(prompt="Hi")
        assert await total(one, "tokenspeed:num_requests_total") == 4


@run
async def test_what_an_operator_does_at_one_worker_holds_at_all(embedded):
    async with served_by_workers(embedded, timings=Timings(stall_s=0.05)) as server:
        one, other = server.workers
        assert (await one.http.post("/pause")).json()["success"]
        assert server.fake.calls[-1][:2] == ("pause_scheduler", "abort")
        server.fake.held.set()
        waiting = asyncio.create_task(other.complete(prompt="Hi"))
        await until(lambda: server.fake.requests)
        await asyncio.sleep(0.3)
        # The engine rests because it was told to: that is no stall, whoever told it.
        for worker in server.workers:
            assert (await worker.http.get("/health")).status_code == 200
        await other.http.post("/resume")
        await asyncio.sleep(0.3)
        health = await one.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "stalled")
        server.fake.held.clear()
        await waiting
        loaded = await one.http.post(
            "/update_weights_from_disk", json={"model_path": "x", "weight_version": "v2"}
        )
        assert loaded.json()["success"], loaded.text
        assert other.service.engine.weight_version == "v2"


@run
async def test_every_worker_knows_that_the_weights_were_dropped_and_that_others_came(embedded):
    unloaded = {"is_unloaded": "false"}

    def answer(method, *args):
        return True, unloaded.get(method, "")

    async with served_by_workers(embedded, on_call=answer) as server:
        one, other = server.workers

        async def ready():
            return [(await each.http.get("/readiness")).status_code for each in server.workers]

        assert await ready() == [200, 200]
        assert (await one.http.post("/sleep?level=2")).json()["success"]
        assert server.fake.calls[-1] == ("release_memory_occupation", None, True)
        await until(lambda: one.service.engine.unloaded and other.service.engine.unloaded)
        assert await ready() == [503, 503]
        loaded = await other.http.post("/update_weights_from_disk", json={"model_path": "x"})
        assert loaded.json()["success"]
        await until(lambda: not one.service.engine.unloaded)
        await until(lambda: not other.service.engine.unloaded)
        assert await ready() == [200, 200]


@run
async def test_states_settings_and_profiles_go_through_a_worker(embedded):
    def answer(method, *args):
        return (True, '{"waiting": 3}' if "internal_state" in method else "recorded")

    async with served_by_workers(embedded, on_call=answer) as server:
        http = server.workers[1].http
        assert (await http.get("/get_internal_state")).json() == {
            "internal_states": [{"waiting": 3}]
        }
        told = await http.post("/set_internal_state", json={"server_args": {"a": 1}})
        assert told.json() == {"updated": True, "server_args": {"waiting": 3}}
        assert server.fake.calls[-1] == ("set_internal_state", {"a": 1})
        assert (await http.post("/start_profile", json={"num_steps": 2})).json()["success"]
        assert server.fake.calls[-1][1]["num_steps"] == 2
        assert (await http.post("/stop_profile")).json()["message"] == "recorded"
        assert (await http.get("/health")).json()["rounds"] == [7]


@run
async def test_all_workers_drain_together(embedded):
    async with served_by_workers(embedded, drain_timeout_s=5) as server:
        one, other = server.workers
        server.fake.held.set()
        running = asyncio.create_task(one.complete(prompt="Hi"))
        await until(lambda: server.fake.requests)
        server.hub.drain()
        await until(lambda: other.service.live.draining)
        # One has a request left, so the other, too, still says why it takes none.
        for worker in server.workers:
            refused = await worker.complete(prompt="Hi")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert (await worker.http.get("/readiness")).status_code == 503
        server.fake.held.clear()
        assert (await running).status_code == 200
        await asyncio.wait([worker.serving for worker in server.workers], timeout=5)
        assert all(worker.serving.done() for worker in server.workers)


@run
async def test_without_an_engine_every_worker_says_so(embedded):
    async with served_by_workers(embedded, says=lambda _: [1] * 500, step_s=0.01) as server:
        running = asyncio.create_task(server.workers[0].complete(**LONG))
        await until(lambda: server.fake.requests)
        await asyncio.to_thread(server.fake.close)
        assert (await running).json()["error"]["code"] == "engine_dead"
        for worker in server.workers:
            health = await worker.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "engine_dead")
            assert (await worker.complete(prompt="Hi")).status_code == 503


@run
async def test_an_engines_refusal_reaches_the_worker_that_asked(embedded):
    async with served_by_workers(
        embedded, refuse=lambda _: {"message": "full", "status_code": 429}
    ) as server:
        refused = await server.workers[1].complete(prompt="Hi")
        assert refused.status_code == 429
        assert refused.json()["error"]["message"] == "full"


@run
async def test_a_worker_that_takes_nothing_costs_one_delta_a_request(embedded):
    async with served_by_workers(embedded, 1, says=lambda _: [1] * 2000) as server:
        (end,) = server.hub._workers
        end.channel.writable = False
        body = {"prompt": [1], "max_tokens": 2000, "ignore_eos": True}
        running = asyncio.create_task(server.workers[0].complete(**body))
        await until(lambda: any(d.finished_reason for d in end._pending.values()))
        (held,) = end._pending.values()
        assert len(held.token_ids) == 2000
        end.channel.writable = True
        end.channel.on_writable()
        assert (await running).json()["usage"]["completion_tokens"] == 2000


def test_workers_can_ask_for_every_operation_of_an_operator():
    asked = {name for name in vars(Control) if not name.startswith("_")} - {"serving_s"}
    assert set(STEERING) == asked
    for name in asked:
        assert callable(getattr(SharedControl, name))
        assert callable(getattr(EngineControl, name))


def test_sums_of_metrics_keep_counts_and_forget_gauges():
    count = Family("a", "counter", "", [("a_total", {"x": "1"}, 2.0), ("a_created", {}, 5.0)])
    gauge = Family("b", "gauge", "", [("b", {}, 1.0)])
    start = Family("c", "gauge", "", [("process_start_time_seconds", {}, 7.0)])
    both = summed([[count, gauge, start], [count, gauge, start]])
    assert [f.samples for f in both] == [
        [("a_total", {"x": "1"}, 4.0), ("a_created", {}, 5.0)],
        [("b", {}, 2.0)],
        [("process_start_time_seconds", {}, 7.0)],
    ]
    assert [family.name for family in kept(both)] == ["a"]


@pytest.mark.parametrize("cut", [1, 3, 7])
@run
async def test_messages_come_whole_however_the_socket_cuts_them(cut):
    heard = []
    channel = Channel(decode_from_owner, heard.append)
    sent = [Gone("why"), Rows(["a"], [Delta([1, 2], "", 1, 2, 0, [0.5], [7])]), Gone("x" * 300)]
    data = b"".join(
        len(body).to_bytes(4, "big") + body for body in map(msgspec.msgpack.encode, sent)
    )
    for at in range(0, len(data), cut):
        channel.data_received(data[at : at + cut])
    assert list(map(msgspec.msgpack.encode, heard)) == list(map(msgspec.msgpack.encode, sent))
