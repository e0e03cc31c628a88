"""The routes of operators: what is asked of engines, what is refused, and in which words."""

import asyncio
import re

import pytest
from tests.fakes.http import run, served, until

from drumline.core.config import Config, ParallelConfig, ServerConfig
from drumline.core.errors import PeerError, RequestError
from drumline.frontend.control_routes import control_routes
from drumline.frontend.engine_control import EngineControl
from drumline.frontend.health import health_of
from drumline.frontend.service import Timings
from drumline.wire.output import ControlReplySlim

OK = {"success": True, "message": ""}

ASKED = [
    # method, path and query, body, what each engine is asked
    ("POST", "/pause", None, ("pause_scheduler", "abort")),
    ("POST", "/pause?mode=keep", None, ("pause_scheduler", "keep")),
    ("POST", "/pause", {"mode": "wait"}, ("pause_scheduler", "wait")),
    ("POST", "/pause_generation", None, ("pause_scheduler", "wait")),
    ("POST", "/pause_generation", {"mode": "in_place"}, ("pause_scheduler", "keep")),
    ("POST", "/pause?wait_for_inflight_requests=true", None, ("pause_scheduler", "wait")),
    ("POST", "/pause?mode=keep&clear_cache=true", None, ("pause_scheduler", "keep")),
    ("POST", "/sleep?mode=wait", None, ("release_memory_occupation", None)),
    ("POST", "/resume", None, ("resume_scheduler",)),
    ("POST", "/continue_generation", {}, ("resume_scheduler",)),
    ("POST", "/sleep", None, ("release_memory_occupation", None)),
    ("POST", "/sleep?level=1&tags=kv_cache", None, ("release_memory_occupation", ["kv_cache"])),
    ("POST", "/release_memory_occupation", {"tags": ["weights"]},
     ("release_memory_occupation", ["weights"])),
    ("POST", "/flush_cache", None, ("flush_cache",)),
    ("GET", "/flush_cache", None, ("flush_cache",)),
    ("POST", "/reset_prefix_cache", None, ("flush_cache",)),
    ("POST", "/reset_prefix_cache?reset_running_requests=false&reset_external=true", None,
     ("flush_cache",)),
    ("POST", "/continue_generation", {"torch_empty_cache": True}, ("resume_scheduler",)),
    ("POST", "/stop_profile", None, ("stop_profile",)),
    ("GET", "/stop_profile", None, ("stop_profile",)),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "call"), ASKED)
@run
async def test_a_route_asks_every_engine(embedded, method, path, body, call):
    async with served(embedded, engines=2) as it:
        reply = await it.http.request(method, path, json=body)
        assert (reply.status_code, reply.json()) == (200, OK)
        assert [fake.calls for fake in it.fakes] == [[call], [call]]


@run
async def test_a_pause_forgets_prefixes_and_a_sleep_ends_what_runs_where_that_is_asked(embedded):
    async with served(embedded) as it:
        assert (await it.http.post("/pause?clear_cache=true")).json() == OK
        assert it.fake.calls == [("pause_scheduler", "abort"), ("flush_cache",)]
        it.fake.calls.clear()
        assert (await it.http.post("/sleep?level=2&mode=abort")).json() == OK
        sleep = ("release_memory_occupation", None, True)
        asked = [("is_scheduler_paused",), ("pause_scheduler", "abort"), sleep]
        assert it.fake.calls == asked
        it.fake.calls.clear()
        it.fake.on_call = lambda method, *args: (not method.startswith("release"), "no room")
        reply = await it.http.post("/sleep?mode=abort")
        assert (reply.status_code, reply.json()["message"]) == (400, "no room")
        assert it.fake.calls[-1] == ("resume_scheduler",), "it serves on"
        assert (await it.http.post("/sleep?mode=keep")).status_code == 400


@run
async def test_a_flush_that_is_refused_is_tried_again_for_as_long_as_it_may_take(embedded):
    refusals = [False, False, True, False]
    async with served(embedded, on_call=lambda *call: (refusals.pop(0), "in use")) as it:
        reply = await it.http.post("/flush_cache?timeout=5")
        assert (reply.status_code, reply.json()["success"]) == (200, True)
        assert len(it.fake.calls) == 3
        assert (await it.http.post("/flush_cache")).status_code == 400
        reply = await it.http.post("/reset_prefix_cache?reset_running_requests=true")
        assert (reply.status_code, reply.json()["error"]["param"]) == (
            501,
            "reset_running_requests",
        )


@run
async def test_a_trainer_is_told_how_many_ranks_there_are(embedded):
    async with served(embedded) as it:
        parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=3)
        it.service.config = Config(parallel=parallel)
        for query, size in (("", 6), ("?include_dp=true", 6), ("?include_dp=false", 2)):
            told = await it.http.get(f"/get_world_size{query}")
            assert told.json() == {"world_size": size}
        assert it.fake.calls == []


@pytest.mark.parametrize("path", ["/wake_up", "/resume_memory_occupation"])
@run
async def test_waking_up_asks_for_memory_and_then_whether_a_pause_is_left(embedded, path):
    async with served(embedded, engines=2) as it:
        reply = await it.http.post(f"{path}?tags=weights&tags=kv_cache")
        assert (reply.status_code, reply.json()) == (200, OK)
        wake = ("resume_memory_occupation", ["weights", "kv_cache"])
        assert [fake.calls for fake in it.fakes] == [[wake, ("is_scheduler_paused",)]] * 2


PROFILE = {
    "output_dir": None, "start_step": None, "num_steps": None, "activities": None,
    "profile_by_stage": False, "with_stack": None, "record_shapes": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/start_profile", None, {}),
        ("/start_profile?num_steps=5&activities=CPU&activities=MEM", None,
         {"num_steps": 5, "activities": ["CPU", "MEM"]}),
        ("/start_profile", {"profile_by_stage": True, "with_stack": False, "output_dir": "a",
                            "record_shapes": True, "start_step": 3},
         {"profile_by_stage": True, "with_stack": False, "output_dir": "a", "record_shapes": True,
          "start_step": 3}),
    ],
)  # fmt: skip
@run
async def test_a_profile_is_asked_of_every_engine_under_one_name(embedded, path, body, asked):
    async with served(embedded, engines=2) as it:
        reply = await it.http.post(path, json=body)
        assert (reply.status_code, reply.json()) == (200, OK)
        ((name, given),) = it.fake.calls
        assert name == "start_profile"
        assert re.fullmatch(r"\d{8}-\d{6}", given.pop("profile_id"))
        assert given == PROFILE | asked
        assert len(it.fakes[1].calls) == 1
        await it.http.get("/start_profile?profile_id=mine")
        assert it.fakes[0].calls[1:] == it.fakes[1].calls[1:]
        assert it.fake.calls[1][1]["profile_id"] == "mine"


@run
async def test_internal_states_are_told_engine_by_engine(embedded):
    async with served(embedded, engines=2) as it:
        for round_, fake in enumerate(it.fakes):
            fake.on_call = lambda *call, round_=round_: (True, f'{{"round":{round_}}}')
        reply = await it.http.get("/get_internal_state")
        told = {"internal_states": [{"round": 0}, {"round": 1}]}
        assert (reply.status_code, reply.json()) == (200, told)
        it.fake.on_call = lambda *call: (False, "this engine has no operation")
        assert (await it.http.get("/get_internal_state")).status_code == 501


@run
async def test_settings_are_asked_of_every_engine_and_a_refusal_comes_with_its_reason(embedded):
    async with served(embedded, engines=2) as it:
        for fake in it.fakes:
            fake.on_call = lambda *call: (True, '{"mixed_batch":false}')
        body = {"server_args": {"mixed_batch": False}}
        reply = await it.http.post("/set_internal_state", json=body)
        told = {"updated": True, "server_args": {"mixed_batch": False}}
        assert (reply.status_code, reply.json()) == (200, told)
        call = ("set_internal_state", {"mixed_batch": False})
        assert [fake.calls for fake in it.fakes] == [[call], [call]]
        it.fakes[1].on_call = lambda *call: (False, "unknown field `colour`")
        reply = await it.http.post("/set_internal_state", json={"server_args": {"colour": 1}})
        assert reply.status_code == 400
        assert reply.json()["success"] is False
        assert "unknown field `colour`" in reply.json()["message"]
        for body in (b"{}", b'{"server_args": 3}', b'{"mixed_batch": false}'):
            reply = await it.http.post("/set_internal_state", content=body)
            assert reply.status_code == 400
            assert "/set_internal_state takes server_args" in reply.json()["error"]["message"]


@run
async def test_is_sleeping_says_so_where_any_engine_is(embedded):
    async with served(embedded, engines=2) as it:
        it.fakes[1].on_call = lambda method, *args: (True, "true")
        reply = await it.http.get("/is_sleeping")
        assert (reply.status_code, reply.json()) == (200, {"is_sleeping": True})
        assert it.fake.calls == [("is_sleeping",)]


@run
async def test_a_sleep_that_keeps_no_weights_leaves_the_server_unready_until_others_are_loaded(
    embedded,
):
    async with served(embedded, engines=2) as it:
        told = {"is_unloaded": "true"}
        for fake in it.fakes:
            fake.on_call = lambda method, *args: (True, told.get(method, ""))
        assert (await it.http.post("/sleep?level=2")).json() == OK
        assert it.fake.calls == [("release_memory_occupation", None, True)]
        for after in ("true", "false"):
            ready = await it.http.get("/readiness")
            assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
            assert "the weights were dropped" in ready.json()["reason"]
            assert (await it.http.get("/health")).status_code == 200
            # A load of some weights, then one of all.
            told["is_unloaded"] = after
            loaded = await it.http.post("/update_weights_from_disk", json={"model_path": "x"})
            assert loaded.json() == OK
        assert (await it.http.get("/readiness")).status_code == 200


@pytest.mark.parametrize("level", [0, 3])
@run
async def test_a_level_of_sleep_that_there_is_not_is_refused_by_name(embedded, level):
    async with served(embedded) as it:
        reply = await it.http.post(f"/sleep?level={level}")
        assert reply.status_code == 400
        assert "$.level" in reply.json()["error"]["message"]
        assert it.fake.calls == []


@run
async def test_what_one_engine_refuses_is_refused_with_every_reason_once(embedded):
    async with served(embedded, engines=3) as it:
        for fake, message in zip(it.fakes, ("busy", "", "busy"), strict=True):
            fake.on_call = lambda method, *args, message=message: (not message, message)
        reply = await it.http.post("/flush_cache")
        assert (reply.status_code, reply.json()) == (400, {"success": False, "message": "busy"})
        it.fakes[1].on_call = lambda method, *args: (False, "draining")
        reply = await it.http.post("/resume")
        assert reply.json() == {"success": False, "message": "busy | draining"}


@run
async def test_is_paused_says_so_where_any_engine_is(embedded):
    async with served(embedded, engines=2) as it:
        for said, paused in ((("false", "false"), False), (("false", "true"), True)):
            for fake, message in zip(it.fakes, said, strict=True):
                fake.on_call = lambda method, *args, message=message: (True, message)
            reply = await it.http.get("/is_paused")
            assert (reply.status_code, reply.json()) == (200, {"is_paused": paused})
        assert it.fake.calls[-1] == ("is_scheduler_paused",)


MALFORMED = [
    ("/pause", b"{", "not valid JSON"),
    ("/pause", b"[]", "Expected `object`"),
    ("/pause", b'{"mood": "keep"}', "unknown field `mood`; /pause takes mode, wait_for"),
    ("/pause?mode=keep", b'{"mode": "wait"}', "mode is given twice"),
    ("/pause", b'{"mode": 3}', "Expected `str | null`, got `int` - at `$.mode`"),
    ("/start_profile", b'{"num_steps": 0}', "Expected `int` >= 1 - at `$.num_steps`"),
    ("/start_profile?profile_id=..%2Fx", b"", "$.profile_id"),
    ("/stop_profile", b'{"output_dir": "x"}', "unknown field `output_dir`; /stop_profile takes no"),
    ("/resume?now=1", b"", "unknown field `now`; /resume takes torch_empty_cache"),
    ("/flush_cache?timeout=-1", b"", "$.timeout"),
]


@run
async def test_what_makes_no_sense_is_refused_by_name_and_asks_nobody(embedded):
    async with served(embedded) as it:
        for path, body, message in MALFORMED:
            reply = await it.http.post(path, content=body)
            assert reply.status_code == 400, path
            assert message in reply.json()["error"]["message"]
        for path in ("/pause", "/resume", "/reset_prefix_cache"):
            reply = await it.http.get(path)
            assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
        assert (await it.http.post("/is_paused")).status_code == 405
        assert it.fake.calls == []


@run
async def test_an_engine_that_does_not_answer_is_waited_for_only_so_long(embedded):
    options = {"timings": Timings(control_s=0.1), "on_call": lambda *call: None}
    async with served(embedded, **options) as it:
        reply = await it.http.post("/pause")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "engine_silent"
        it.fake.close()
        await it.service.engine.closed.wait()
        reply = await it.http.post("/resume")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")


@run
async def test_silence_is_no_stall_while_an_operator_paused_the_engine(embedded):
    async with served(embedded, timings=Timings(stall_s=0.2)) as it:
        it.fake.held.set()
        asking = asyncio.create_task(it.chat())
        await until(lambda: it.fake.requests)
        await it.http.post("/pause?mode=keep")
        await asyncio.sleep(0.3)
        assert health_of(it.service).status == "ok"
        await it.http.post("/resume")
        assert health_of(it.service).status == "ok"
        await until(lambda: health_of(it.service).status == "stalled")
        it.fake.held.clear()
        assert (await asking).status_code == 200


class Silenced:
    """An engine link that answers what it is told to, and a clock that stands still."""

    def __init__(self, **said):
        self.said = said
        self.time = 0

    def now_us(self):
        return self.time

    async def call(self, method, *args, timeout_s):
        success, message = self.said.get(method, (True, ""))
        return (ControlReplySlim(call_id=1, success=success, message=message),)


@run
async def test_a_pause_that_is_refused_leaves_the_engine_at_work():
    link = Silenced(
        pause_scheduler=(False, "a pause is already in progress"),
        is_scheduler_paused=(True, "false"),
    )
    control = EngineControl(link, 1.0, link)
    assert not (await control.pause("wait")).success
    link.time = 2_000_000
    assert control.serving_s == 2.0


class Pausable(Silenced):
    """One that is paused and goes on as it is told, and loads when the test says so."""

    unloaded = False

    def __init__(self):
        super().__init__()
        self.standing, self.loading = "false", asyncio.Event()
        self.loaded, self.answered = asyncio.Event(), asyncio.Event()
        self.answered.set()

    async def call(self, method, *args, timeout_s):
        if method == "pause_scheduler":
            self.standing = "true"
            await self.answered.wait()
        elif method == "resume_scheduler":
            self.standing = "false"
        elif method == "update_weight_from_disk":
            self.loading.set()
            await self.loaded.wait()
        message = self.standing if method == "is_scheduler_paused" else ""
        return (ControlReplySlim(call_id=1, success=True, message=message),)


def loaded(control):
    how = {"version": None, "abort": False, "rests": False}
    return control.load_weights("update_weight_from_disk", ["/new"], **how)


@run
async def test_a_pause_during_a_load_outlives_it_however_late_its_answer_comes():
    for late in (False, True):
        link = Pausable()
        control = EngineControl(link, 1.0, link)
        loading = asyncio.create_task(loaded(control))
        await link.loading.wait()
        if late:
            link.answered.clear()
        pausing = asyncio.create_task(control.pause("keep"))
        await asyncio.sleep(0)
        link.loaded.set()
        assert (await loading).success
        link.answered.set()
        assert (await pausing).success
        assert await control.paused()
        await control.resume()
        assert not await control.paused()
        # What holds the next one up is not this pause.
        assert (await loaded(control)).success
        assert not await control.paused()


class Mute(Silenced):
    """One that answers nothing."""

    closed = asyncio.Event()

    async def call(self, method, *args, timeout_s):
        raise PeerError(f"engine 0 did not answer {method} within {timeout_s:g} s")


@run
async def test_a_pause_that_is_never_answered_does_not_excuse_silence():
    link = Mute()
    control = EngineControl(link, 1.0, link)
    with pytest.raises(RequestError):
        await control.pause("keep")
    link.time = 2_000_000
    assert control.serving_s == 2.0


@run
async def test_the_operators_key_guards_every_one_of_them(embedded):
    keys = ServerConfig(host="127.0.0.1", port=0, api_key=("client",), admin_api_key="operator")
    async with served(embedded, server=keys) as it:
        for methods, path, _ in control_routes(it.service):
            for method in methods.split():
                assert (await it.http.request(method, path)).status_code == 401
                bearer = {"authorization": "Bearer client"}
                assert (await it.http.request(method, path, headers=bearer)).status_code == 403
        bearer = {"authorization": "Bearer operator"}
        assert (await it.http.post("/resume", headers=bearer)).status_code == 200
        assert it.fake.calls == [("resume_scheduler",)]


@pytest.mark.parametrize("path", ["/update_weights_from_mooncake", "/rebalance_experts"])
@run
async def test_what_this_version_does_not_do_is_refused_by_name(embedded, path):
    async with served(embedded) as it:
        reply = await it.http.post(path, json={})
        assert reply.status_code == 501
        assert reply.json()["error"]["message"] == f"{path} is not supported by this version"
        assert it.fake.calls == []
