"""The routes of trainers: what is asked of engines, and which weights an answer says it is of."""

import asyncio
import base64

import httpx
import pytest
from tests.fakes.http import run, served, until
from tests.fakes.workers import served_by_workers

from drumline.core.config import Config, ModelConfig, ServerConfig
from drumline.core.model_files import find_model
from drumline.frontend.health import health_of
from drumline.frontend.service import Timings
from drumline.wire.frames import MOST_TENSOR_BYTES
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams, normalized

OK = {"success": True, "message": ""}


def asked(fake):
    """Return what an engine was asked for, but for whether it is paused."""
    return [call for call in fake.calls if call[0] != "is_scheduler_paused"]


LOAD = ("update_weight_from_disk", "/new", None, "step-7", True)


@run
async def test_weights_are_loaded_while_the_engine_is_paused_for_that_alone(embedded):
    async with served(embedded, engines=2) as it:
        body = {"model_path": "/new", "weight_version": "step-7"}
        reply = await it.http.post("/update_weights_from_disk", json=body)
        assert (reply.status_code, reply.json()) == (200, OK)
        for fake in it.fakes:
            assert asked(fake) == [("pause_scheduler", "wait"), LOAD, ("resume_scheduler",)]
        it.fake.calls.clear()
        body["abort_all_requests"] = True
        await it.http.post("/update_weights_from_disk", json=body)
        assert asked(it.fake)[0] == ("pause_scheduler", "abort")


@run
async def test_an_engine_that_is_paused_already_stays_so_after_a_load(embedded):
    def on_call(method, *args):
        return True, "true" if method == "is_scheduler_paused" else "weights loaded from /new"

    async with served(embedded, on_call=on_call) as it:
        body = {"model_path": "/new", "load_format": "gguf", "flush_cache": False}
        reply = await it.http.post("/update_weights_from_disk", json=body)
        assert reply.json() == {"success": True, "message": "weights loaded from /new"}
        assert asked(it.fake) == [("update_weight_from_disk", "/new", "gguf", None, False)]


@run
async def test_a_load_that_is_refused_leaves_the_engine_serving(embedded):
    def on_call(method, *args):
        return method != "update_weight_from_disk", "no" if method.startswith("update") else ""

    async with served(embedded, on_call=on_call) as it:
        reply = await it.http.post("/update_weights_from_disk", json={"model_path": "/new"})
        assert (reply.status_code, reply.json()) == (400, {"success": False, "message": "no"})
        assert asked(it.fake)[-1] == ("resume_scheduler",)
        reply = await it.http.post("/update_weights_from_disk", json={"path": "/new"})
        assert reply.status_code == 400
        assert "unknown field `path`" in reply.json()["error"]["message"]


@run
async def test_the_name_of_the_weights_that_serve_is_told(embedded):
    async with served(embedded, engines=2, on_call=lambda *call: (True, "step-7")) as it:
        reply = await it.http.get("/get_weight_version")
        assert (reply.status_code, reply.json()) == (200, {"weight_version": "step-7"})
        it.fake.on_call = lambda *call: (False, "this engine has no operation 'get_weight_version'")
        assert (await it.http.get("/get_weight_version")).status_code == 501


@run
async def test_an_engine_may_stay_paused_after_a_load_and_goes_on_after_one_that_failed(embedded):
    async with served(embedded) as it:
        body = {"model_path": "/new", "keep_pause": True, "is_async": False, "token_step": 3,
                "torch_empty_cache": True, "recapture_cuda_graph": False}  # fmt: skip
        assert (await it.http.post("/update_weights_from_disk", json=body)).json() == OK
        assert [call[0] for call in asked(it.fake)] == ["pause_scheduler", LOAD[0]]
        it.fake.on_call = lambda method, *args: (not method.startswith("update"), "")
        assert (await it.http.post("/update_weights_from_disk", json=body)).status_code == 400
        assert asked(it.fake)[-1] == ("resume_scheduler",)


@run
async def test_an_answer_says_which_weights_it_was_computed_with(embedded):
    async def generate():
        body = {"text": "a", "sampling_params": {"max_new_tokens": 4}}
        return (await it.http.post("/generate", json=body)).json()["meta_info"]["weight_version"]

    async with served(embedded) as it:
        assert await generate() == "default"
        load = it.http.post
        version = {"model_path": "/new", "weight_version": "step-8"}
        await load("/update_weights_from_disk", json=version)
        assert await generate() == "step-8"
        it.fake.on_call = lambda method, *args: (not method.startswith("update"), "")
        version["weight_version"] = "step-9"
        assert (await load("/update_weights_from_disk", json=version)).status_code == 400
        assert await generate() == "step-8"


@run
async def test_an_answer_that_is_read_late_says_what_served_when_it_ended(embedded):
    async with served(embedded) as it:
        engine = it.service.engine
        sampling = normalized(SamplingParams(max_new_tokens=2))
        stream = engine.submit(
            TokenizedGenerateReqInput(rid="r", input_ids=[1], sampling_params=sampling)
        )
        await until(lambda: not engine.in_flight)
        engine.weight_version = "later"
        *_, last = [delta async for delta in stream]
        assert (last.finished_reason, last.weight_version) == ("length", "default")


TENSORS = b"\x80\x00safetensors, or what not"
BASE64 = base64.b64encode(TENSORS).decode()
NAMED = {"names": ["a", "b"], "dtypes": ["bfloat16", "torch.float32"], "shapes": [[2, 3], [4]]}
GROUP = "weight_update_group"

ASKED = [
    ("/update_weights_from_tensor", {"serialized_named_tensors": [BASE64, BASE64]},
     ("update_weights_from_tensor", [TENSORS, TENSORS], None, True, None)),
    ("/update_weights_from_tensor?flush_cache=false",
     {"serialized_named_tensors": [BASE64], "load_format": "safetensors", "weight_version": "2"},
     ("update_weights_from_tensor", [TENSORS], "safetensors", False, "2")),
    ("/update_weights_from_distributed", NAMED,
     ("update_weights_from_distributed", *NAMED.values(), GROUP, True, None)),
    ("/update_weights_from_distributed",
     NAMED | {"group_name": "g", "flush_cache": False, "weight_version": "3",
              "load_format": "auto"},
     ("update_weights_from_distributed", *NAMED.values(), "g", False, "3")),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "call"), ASKED)
@run
async def test_a_load_asks_every_engine_while_it_is_paused(embedded, path, body, call):
    async with served(embedded, engines=2) as it:
        reply = await it.http.post(path, json=body)
        assert (reply.status_code, reply.json()) == (200, OK)
        for fake in it.fakes:
            assert asked(fake) == [("pause_scheduler", "wait"), call, ("resume_scheduler",)]


@run
async def test_tensors_may_come_as_they_are_and_be_larger_than_other_bodies(embedded):
    server = ServerConfig(host="127.0.0.1", port=0, max_body_bytes=1000)
    async with served(embedded, server=server) as it:
        path = "/update_weights_from_tensor?weight_version=5&abort_all_requests=true"
        body, kind = TENSORS * 100, {"content-type": "application/octet-stream"}
        reply = await it.http.post(path, content=body, headers=kind)
        assert (reply.status_code, reply.json()) == (200, OK)
        assert asked(it.fake)[:2] == [
            ("pause_scheduler", "abort"),
            ("update_weights_from_tensor", [body], None, True, "5"),
        ]
        assert it.service.engine.weight_version == "5"
        it.fake.calls.clear()
        reply = await it.http.post("/update_weights_from_disk", content=b" " * 1001)
        assert reply.status_code == 413
        reply = await it.http.post(path, content=body)
        assert reply.status_code == 400
        assert "not valid JSON" in reply.json()["error"]["message"]
        reply = await it.http.post(path, json={"serialized_named_tensors": ["?"]})
        assert reply.status_code == 400
        assert "Invalid base64" in reply.json()["error"]["message"]
        assert it.fake.calls == []
    assert MOST_TENSOR_BYTES > 100 << 20


def slowly(first, then):
    """A body that begins, and goes on once `then` is set."""

    async def parts():
        yield first
        await then.wait()
        yield b""

    return parts()


@run
async def test_bodies_of_tensors_are_taken_one_at_a_time(embedded):
    path, kind = "/update_weights_from_tensor", {"content-type": "application/octet-stream"}
    timings = Timings(turn_s=0.3, body_s=2.0)
    async with served(embedded, timings=timings) as it:

        def sending(body):
            return asyncio.create_task(it.http.post(path, content=body, headers=kind))

        go_on = asyncio.Event()
        first = sending(slowly(TENSORS, go_on))
        await asyncio.sleep(0.05)
        refused = await sending(TENSORS)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "another body of tensors" in refused.json()["error"]["message"]
        assert it.fake.calls == [], "not even begun"
        second = sending(TENSORS)
        await asyncio.sleep(0.05)
        go_on.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]
        assert len([call for call in it.fake.calls if call[0].startswith("update")]) == 2


@run
async def test_a_body_of_tensors_that_never_comes_gives_its_turn_up(embedded):
    path, kind = "/update_weights_from_tensor", {"content-type": "application/octet-stream"}
    async with served(embedded, timings=Timings(turn_s=5.0, body_s=0.2)) as it:
        where = httpx.URL(it.url)
        reader, writer = await asyncio.open_connection(where.host, where.port)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc".encode())
        assert b" 408 " in await reader.readline()
        writer.close()
        assert (await it.http.post(path, content=TENSORS, headers=kind)).status_code == 200


@run
async def test_a_group_is_joined_and_left_without_a_pause(embedded):
    async with served(embedded, engines=2) as it:
        where = {"master_address": "10.0.0.1", "master_port": 29500}
        places = {"rank_offset": 1, "world_size": 3}
        for path, body in (
            ("/init_weights_update_group", where | places | {"backend": "gloo"}),
            ("/destroy_weights_update_group", None),
            ("/update_weight_version", {"new_version": "7"}),
        ):
            reply = await it.http.post(path, json=body)
            assert (reply.status_code, reply.json()) == (200, OK)
        assert it.fakes[1].calls == [
            ("init_weights_update_group", "10.0.0.1", 29500, 1, 3, GROUP, "gloo"),
            ("destroy_weights_update_group", GROUP),
            ("update_weight_version", "7"),
        ]
        assert it.service.engine.weight_version == "7"


@run
async def test_a_load_of_no_name_is_of_what_was_loaded_last(embedded):
    async with served(embedded) as it:
        for body, path in (
            ({}, str(find_model(None).path)),
            ({"model_path": "/new"}, "/new"),
            ({"flush_cache": False}, "/new"),
        ):
            it.fake.calls.clear()
            await it.http.post("/update_weights_from_disk", json=body)
            assert asked(it.fake)[1][:2] == ("update_weight_from_disk", path)
        it.service.engine.weight_path = None
        it.service.config = Config(model=ModelConfig(model="/gone"))
        reply = await it.http.post("/update_weights_from_disk")
        assert reply.status_code == 400
        assert "/gone" in reply.json()["error"]["message"]


@run
async def test_the_checkpoint_that_was_loaded_last_is_told(embedded):
    async with served(embedded) as it:
        await it.http.post("/update_weights_from_disk", json={"model_path": "/new"})
        it.fake.on_call = lambda method, *args: (not method.startswith("update"), "")
        await it.http.post("/update_weights_from_disk", json={"model_path": "/newer"})
        told = (await it.http.get("/get_model_info")).json()
        assert (told["model_path"], told["tokenizer_path"]) == ("/new", "tiny")


@pytest.mark.parametrize("method", ["GET", "POST"])
@run
async def test_a_weight_is_told_as_it_is_and_of_every_engine_where_there_are_several(
    embedded, method
):
    for engines, told in ((1, "[[1.5,2.0]]"), (2, "[[[1.5,2.0]],[[1.5,2.0]]]")):
        on_call = {"on_call": lambda *call: (True, "[[1.5,2.0]]")}
        async with served(embedded, engines=engines, **on_call) as it:
            reply = await it.http.request(method, "/get_weights_by_name?name=w&truncate_size=1")
            assert (reply.status_code, reply.text) == (200, told)
            assert it.fake.calls == [("get_weights_by_name", "w", 1)]
            it.fake.on_call = lambda *call: (False, "no weight here is called w")
            reply = await it.http.request(method, "/get_weights_by_name?name=w")
            assert reply.status_code == 400
            assert reply.json()["error"]["message"] == "no weight here is called w"


@run
async def test_every_answer_of_every_route_says_which_weights_it_is_of(embedded):
    async with served(embedded) as it:
        for version in ("default", "step-8"):
            it.service.engine.weight_version = version
            metadata = {"weight_version": version}
            assert (await it.chat()).json()["metadata"] == metadata
            assert (await it.complete(prompt="a")).json()["metadata"] == metadata
            info = (await it.http.get("/server_info")).json()
            assert info["weight_version"] == version
            told = (await it.http.get("/model_info")).json()
            assert (told["weight_version"], told["model_path"]) == (version, "tiny")
            for path, body in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "a"})):
                events = await it.events(path, **body)
                *others, last, done = events
                assert done == "[DONE]"
                assert last["metadata"] == metadata
                assert last["choices"][0]["finish_reason"]
                assert not any("metadata" in event for event in others)


@run
async def test_a_server_whose_weights_are_lost_is_not_healthy_and_says_why(embedded):
    def on_call(method, *args):
        if method == "lost_weights":
            return True, "" if it.held else "the weights were discarded"
        return not method.startswith("update"), "cut short"

    async with served(embedded, on_call=on_call) as it:
        it.held = True
        load = {"model_path": "/new"}
        assert (await it.http.post("/update_weights_from_disk", json=load)).status_code == 400
        assert health_of(it.service).ok
        it.held = False
        assert (await it.http.post("/update_weights_from_disk", json=load)).status_code == 400
        reply = await it.http.get("/health")
        assert (reply.status_code, reply.json()["status"]) == (503, "weights_lost")
        assert reply.json()["reason"] == "the weights were discarded"


@run
async def test_workers_change_weights_through_the_one_that_holds_the_link(embedded):
    def on_call(method, *args):
        if method == "lost_weights":
            return True, "the weights were discarded"
        told = "[[1.5]]" if method == "get_weights_by_name" else ""
        return method != "update_weights_from_distributed", told

    async with served_by_workers(embedded, on_call=on_call) as it:
        one, other = it.workers
        path = "/update_weights_from_tensor?weight_version=5"
        body, kind = TENSORS * 1000, {"content-type": "application/octet-stream"}
        reply = await one.http.post(path, content=body, headers=kind)
        assert (reply.status_code, reply.json()) == (200, OK)
        call = ("update_weights_from_tensor", [body], None, True, "5")
        assert asked(it.fake) == [("pause_scheduler", "wait"), call, ("resume_scheduler",)]
        answer = await other.complete(prompt="a")
        assert answer.json()["metadata"] == {"weight_version": "5"}
        told = await other.http.get("/get_weights_by_name?name=w")
        assert (told.status_code, told.text) == (200, "[[1.5]]")
        group = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}
        assert (await other.http.post("/init_weights_update_group", json=group)).json() == OK
        assert (await other.http.post("/destroy_weights_update_group")).json() == OK
        renamed = await other.http.post("/update_weight_version", json={"new_version": "6"})
        assert renamed.json() == OK
        assert (await one.complete(prompt="a")).json()["metadata"] == {"weight_version": "6"}
        reply = await one.http.post("/update_weights_from_distributed", json=NAMED)
        assert reply.status_code == 400
        health = (await other.http.get("/health")).json()
        assert (health["status"], health["reason"]) == (
            "weights_lost",
            "the weights were discarded",
        )
