"""The engine's link and the client, end to end over loopback sockets."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager, contextmanager

import msgspec
import numpy as np
import pytest
import zmq
from tests.fakes.engine import registration

from drumline.client.engine_client import EngineClient
from drumline.contract.messages import AbortAsked, CallAsked, CallReply, Submitted
from drumline.contract.outputs import Load, OutputColumns
from drumline.control.transport import Transport
from drumline.control.transport.intake import MOST_BYTES
from drumline.core.errors import PeerError
from drumline.core.hashing import page_digests
from drumline.wire.codec import encode
from drumline.wire.control import (
    FlushCacheReqInput,
    GetInternalStateReq,
    GetWeightsByNameReqInput,
    IsSchedulerPausedReqInput,
    IsSchedulerPausedReqOutput,
    SetInternalStateReq,
    UpdateWeightsFromTensorReqInput,
)
from drumline.wire.frames import Call
from drumline.wire.handshake import Addresses, Init, decode_greeting, decode_registration
from drumline.wire.output import ENGINE_CORE_DEAD
from drumline.wire.progress import decode_progress
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams

TIMEOUT_S = 10
LOAD = Load(num_running=2, num_waiting=5, kv_active_pages=100, kv_total_pages=400)


def request(rid="r1", ids=(1, 2, 3), params=None, **changes):
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=list(ids), sampling_params=params or SamplingParams(), **changes
    )


def outputs(*rows):
    """Columns of (rid, ids, finished reason) rows."""
    return OutputColumns(
        rids=[rid for rid, _, _ in rows],
        output_ids=[list(ids) for _, ids, _ in rows],
        finished_reasons=[reason for _, _, reason in rows],
        prompt_tokens=[3 for _ in rows],
        completion_tokens=[len(ids) for _, ids, _ in rows],
        cached_tokens=[0 for _ in rows],
    )


def received(link, count=1):
    """Wait for `count` messages."""
    messages = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(messages) < count and time.monotonic() < deadline:
        messages += link.receive(0.05)
    assert len(messages) == count
    return messages


def run(test):
    """Run an async test in a loop of its own, bounded."""

    def bounded():
        async def main():
            async with asyncio.timeout(40):
                await test()

        asyncio.run(main())

    bounded.__name__ = test.__name__
    return bounded


@asynccontextmanager
async def linked(**options):
    client = EngineClient()
    link = Transport(await client.bind(), registration(**options))
    link.start()
    try:
        await client.ready(TIMEOUT_S)
        yield client, link
    finally:
        await asyncio.to_thread(link.close)
        await client.close()


class BareFrontend:
    """The frontend's sockets without a client behind them, to send what no client would."""

    def __init__(self, address="tcp://127.0.0.1:*"):
        self.context = zmq.Context()
        self.handshake = self._bound(zmq.ROUTER, address)
        self.requests = self._bound(zmq.ROUTER)
        self.outputs = self._bound(zmq.PULL)

    def _bound(self, kind, address="tcp://127.0.0.1:*"):
        socket = self.context.socket(kind)
        socket.rcvtimeo = TIMEOUT_S * 1000
        socket.linger = 0
        socket.bind(address)
        return socket

    @property
    def address(self):
        return self.handshake.last_endpoint.decode()

    def accept(self):
        """Carry out the handshake; returns the registration."""
        self.identity, hello = self.handshake.recv_multipart()
        assert decode_greeting(hello).status == "HELLO"
        addresses = Addresses(
            inputs=[self.requests.last_endpoint.decode()],
            outputs=[self.outputs.last_endpoint.decode()],
        )
        self.handshake.send_multipart([self.identity, encode(Init(addresses=addresses))])
        _, ready = self.handshake.recv_multipart()
        assert decode_greeting(ready).status == "READY"
        _, registered = self.requests.recv_multipart()
        return decode_registration(registered)

    def send(self, *frames):
        self.requests.send_multipart([self.identity, *frames])

    def output(self):
        return msgspec.msgpack.decode(self.outputs.recv())

    def close(self):
        for socket in (self.handshake, self.requests, self.outputs):
            socket.close()
        self.context.term()


@contextmanager
def bare_link(**options):
    frontend = BareFrontend()
    link = Transport(frontend.address, registration(**options))
    link.start()
    try:
        frontend.accept()
        assert link.ready(TIMEOUT_S)
        yield frontend, link
    finally:
        link.close()
        frontend.close()


# --- the main path


@run
async def test_a_request_goes_in_and_its_outputs_come_out():
    async with linked(prefix_granularity=2) as (client, link):
        params = SamplingParams(max_new_tokens=4, temperature=0.0, stop_token_ids={9, 2})
        stream = client.submit(request(ids=[5, 6, 7, 8, 9], params=params, stream=True))
        (message,) = await asyncio.to_thread(received, link)
        arrived = message.request
        assert isinstance(message, Submitted)
        assert (arrived.rid, arrived.invalid) == ("r1", None)
        assert arrived.input_ids.tolist() == [5, 6, 7, 8, 9]
        assert arrived.input_ids.dtype == np.int32
        assert (arrived.max_new_tokens, arrived.stop_token_ids) == (4, (2, 9))
        assert arrived.stream
        assert arrived.sampling.greedy
        assert arrived.sampling.temperature == 1.0
        assert arrived.page_digests == page_digests(arrived.input_ids, 2)
        assert len(arrived.page_digests) == 2 * 32
        link.send(outputs(("r1", [11], "")), LOAD)
        link.send(outputs(("r1", [12, 13], "stop")), LOAD)
        deltas = [delta async for delta in stream]
        assert [i for delta in deltas for i in delta.token_ids] == [11, 12, 13]
        assert deltas[-1].finished_reason == "stop"
        assert client.loads == (LOAD,)


@run
async def test_every_column_arrives_where_it_belongs():
    async with linked() as (client, link):
        stream = client.submit(request(return_logprob=True, top_logprobs_num=2))
        (message,) = await asyncio.to_thread(received, link)
        assert message.request.return_logprob
        assert message.request.top_logprobs == 2
        link.send(
            OutputColumns(
                rids=["r1"],
                output_ids=[[7]],
                finished_reasons=["abort"],
                prompt_tokens=[3],
                completion_tokens=[1],
                cached_tokens=[2],
                logprobs=[[-0.25]],
                logprob_ids=[[7]],
                top_logprobs=[[[-0.25, -1.5]]],
                top_logprob_ids=[[[7, 8]]],
                details=[{"message": "no room", "status_code": 503}],
            ),
            LOAD,
        )
        (delta,) = [delta async for delta in stream]
        assert (delta.token_ids, delta.finished_reason) == ([7], "abort")
        assert (delta.prompt_tokens, delta.completion_tokens, delta.cached_tokens) == (3, 1, 2)
        assert (delta.logprobs, delta.logprob_ids) == ([-0.25], [7])
        assert (delta.top_logprobs, delta.top_logprob_ids) == ([[-0.25, -1.5]], [[7, 8]])
        assert delta.details == {"message": "no room", "status_code": 503}


@run
async def test_an_abort_reaches_the_engine():
    async with linked() as (client, link):
        async with client.submit(request()):
            await asyncio.to_thread(received, link)
        assert await asyncio.to_thread(received, link) == [AbortAsked(("r1",))]


@run
async def test_a_call_is_answered_under_its_id():
    async with linked() as (client, link):
        call = asyncio.create_task(client.call("flush_cache", 0.5, timeout_s=TIMEOUT_S))
        (asked,) = await asyncio.to_thread(received, link)
        assert asked == CallAsked(1, "flush_cache", (0.5,))
        link.reply(CallReply(1, success=False, message="busy"))
        (reply,) = await call
        assert (reply.call_id, reply.success, reply.message) == (1, False, "busy")


def test_the_link_says_where_the_loop_is_though_it_hears_nothing():
    with bare_link() as (frontend, link):
        for _ in range(3):
            link.receive(0)
        for asked in (1, 2):
            frontend.send(b"\x02", encode([asked, "progress", []]))
            tag, call_id, success, message, _ = frontend.output()
            assert (tag, call_id, success) == ("ControlReplySlim", asked, True)
            told = decode_progress(message)
            assert told.round == 3
            assert 0 <= told.seconds < TIMEOUT_S
        assert link.receive(0) == [], "no round is told of it"


def test_waiting_ends_when_a_message_arrives():
    with bare_link() as (frontend, link):
        sent = threading.Timer(0.1, lambda: frontend.send(b"\x01", encode(["r"])))
        sent.start()
        started = time.monotonic()
        assert link.receive(TIMEOUT_S) == [AbortAsked(("r",))]
        assert time.monotonic() - started < 2
        sent.join()


def test_waiting_is_bounded():
    with bare_link() as (_, link):
        started = time.monotonic()
        assert link.receive(0.01) == []
        assert link.receive(0) == []
        assert time.monotonic() - started < 2


def test_seeds_follow_from_the_id_where_none_is_given():
    with bare_link() as (frontend, link):
        frontend.send(b"\x00", encode(request("r1")))
        frontend.send(b"\x00", encode(request("r2", params=SamplingParams(seed=2**64 - 1))))
        first, second = received(link, 2)
        assert first.request.sampling.seed == 0x0D0E09B1
        assert 0 <= second.request.sampling.seed < 2**63


# --- what cannot be served is answered


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"params": SamplingParams(n=2)}, "n is 2"),
        ({"params": SamplingParams(stop=["x"])}, "stop strings"),
        ({"params": SamplingParams(stop_strs=["x"], is_normalized=True)}, "stop strings"),
        ({"params": SamplingParams(logprobs=3)}, "logprobs is 3"),
        ({"params": SamplingParams(json_schema="{}", regex="a")}, "json_schema and regex are set"),
        ({"params": SamplingParams(custom_params={"drumline": {"xml": 1}})}, "custom_params"),
        ({"params": SamplingParams(custom_params={"drumline": {"choice": 1}})}, "choice"),
        ({"params": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"params": SamplingParams(logit_bias={"x": 1.0})}, "logit_bias"),
        ({"params": SamplingParams(logit_bias={str(2**40): 1.0})}, "logit_bias"),
        ({"params": SamplingParams(stop_token_ids={2**40})}, "stop_token_ids"),
        ({"ids": [1, 2**31]}, "input_ids"),
        ({"ids": []}, "input_ids is empty"),
        ({"return_logprob": True, "logprob_start_len": 3000}, "logprob_start_len"),
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
        ({"token_ids_logprob": [1 << 40]}, "token_ids_logprob"),
        ({"input_embeds": [[0.5]]}, "input_embeds"),
        ({"validation_error": "too long"}, "too long"),
    ],
)
def test_what_the_engine_cannot_do_arrives_as_invalid(changes, reason):
    with bare_link() as (frontend, link):
        frontend.send(b"\x00", encode(request(**changes)))
        (message,) = received(link)
        assert message.request.rid == "r1"
        assert reason in message.request.invalid


def test_a_malformed_request_with_an_id_arrives_as_invalid():
    with bare_link() as (frontend, link):
        whole = encode(request("r1"))
        frontend.send(b"\x00", whole[:-20])
        frontend.send(b"\x00", encode(["TokenizedGenerateReqInput", "r2", None, None, "text"]))
        first, second = received(link, 2)
        assert (first.request.rid, second.request.rid) == ("r1", "r2")
        assert "malformed" in first.request.invalid
        assert "malformed" in second.request.invalid


def test_hostile_frames_are_counted_and_harm_nobody():
    hostile = [
        (b"\x00",),
        (b"",),
        (b"\x00\x00", b"\x90"),
        (b"\x07", b"\x90"),
        (b"\x00", b""),
        (b"\x00", b"\xc1"),
        (b"\x00", b"\xdd\xff\xff\xff\xff"),
        (b"\x00", b"\x91" * 100_000),
        (b"\x00", encode(request(rid=None))),
        (b"\x00", encode(request(rid=["a", "b"]))),
        (b"\x01", b"\x93\x01\x02\x03"),
        (b"\x02", b"\xc0"),
        (b"\x02", encode(["PickleWrapper", b"\x80\x04."])),
        (b"\x02", encode([-1, "flush_cache", []])),
    ]
    with bare_link() as (frontend, link):
        for frames in hostile:
            frontend.send(*frames)
        frontend.send(b"\x00", encode(request("good")))
        (message,) = received(link)
        assert message.request.rid == "good"
        assert message.request.invalid is None
        assert link.refused == len(hostile)
        assert not link.closed


def test_a_malformed_call_is_answered_under_its_id():
    with bare_link() as (frontend, link):
        frontend.send(b"\x02", encode([7]))
        tag, call_id, success, message, _ = frontend.output()
        assert (tag, call_id, success) == ("ControlReplySlim", 7, False)
        assert "malformed" in message
        assert link.refused == 1


def test_what_nests_too_deeply_for_another_stack_is_refused():
    # Each is shallow enough to be decoded, and too deep to be encoded from a round's stack.
    deep = b"\x91" * 970 + b"\x01"
    with bare_link() as (frontend, link):
        frontend.send(b"\x02", b"\x93\x07" + encode("pause_scheduler") + b"\x91" + deep)
        _, call_id, success, message, _ = frontend.output()
        assert (call_id, success) == (7, False)
        assert "its arguments nests deeper than 64 levels" in message
        hole = {"drumline": {"logits_processors": {"x": "hole"}}}
        whole = encode(request(params=SamplingParams(custom_params=hole)))
        frontend.send(b"\x00", whole.replace(encode("hole"), deep))
        (message,) = received(link)
        assert "nests deeper" in message.request.invalid


def test_a_message_of_more_bytes_than_the_ranks_exchange_is_refused():
    with bare_link() as (frontend, link):
        frontend.send(b"\x00", encode(request(ids=[1] * MOST_BYTES)))
        (message,) = received(link)
        assert f"{MOST_BYTES} are allowed" in message.request.invalid
        for kind in (b"\x01", b"\x02"):
            frontend.send(kind, encode(["x" * MOST_BYTES]))
        frontend.send(b"\x00", encode(request("good")))
        (message,) = received(link)
        assert (message.request.rid, message.request.invalid) == ("good", None)
        assert link.refused == 2


# --- frontends that name operations by struct


def test_an_operation_without_an_id_is_answered_in_its_own_form():
    with bare_link() as (frontend, link):
        frontend.send(b"\x02", encode(IsSchedulerPausedReqInput(rid="q")))
        frontend.send(b"\x02", encode(FlushCacheReqInput()))
        paused, flush = received(link, 2)
        assert (paused.method, paused.args) == ("is_scheduler_paused", ())
        assert flush.method == "flush_cache"
        assert paused.call_id != flush.call_id
        link.reply(CallReply(flush.call_id, success=True))
        link.reply(CallReply(paused.call_id, success=True, message="true"))
        assert frontend.output() == ["FlushCacheReqOutput", None, None, True]
        answer = msgspec.msgpack.decode(frontend.outputs.recv(), type=IsSchedulerPausedReqOutput)
        assert (answer.rid, answer.is_paused) == ("q", True)
        frontend.send(b"\x02", encode(IsSchedulerPausedReqInput()))
        (again,) = received(link, 1)
        link.reply(CallReply(again.call_id, success=True, message="false"))
        assert frontend.output() == ["IsSchedulerPausedReqOutput", None, None, False]


def test_a_weight_is_told_in_the_form_of_the_question():
    with bare_link() as (frontend, link):
        for success, message, told in ((True, "[[1.5, 2.0]]", [[1.5, 2.0]]), (False, "no", [])):
            frontend.send(b"\x02", encode(GetWeightsByNameReqInput(name="w", truncate_size=1)))
            (asked,) = received(link, 1)
            assert (asked.method, asked.args) == ("get_weights_by_name", ("w", 1))
            link.reply(CallReply(asked.call_id, success, message))
            assert frontend.output() == ["GetWeightsByNameReqOutput", None, None, told]


def test_a_message_with_tensors_may_be_larger_than_others(monkeypatch):
    monkeypatch.setattr("drumline.control.transport.link.MOST_BYTES", 1000)
    monkeypatch.setattr("drumline.control.transport.link.MOST_TENSOR_BYTES", 4000)
    native = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[b"t" * 4000], load_format=None, flush_cache=True
    )
    with bare_link() as (frontend, link):
        frontend.send(b"\x02", encode(Call(1, "update_weights_from_tensor", [[b"t" * 4000]])))
        frontend.send(b"\x02", encode(native))
        named, by_struct = received(link, 2)
        assert named.method == by_struct.method == "update_weights_from_tensor"
        assert named.args[0] == by_struct.args[0] == [b"t" * 4000]
        frontend.send(b"\x02", encode(Call(2, "update_weights_from_tensor", [[b"t" * 5000]])))
        frontend.send(b"\x02", encode(Call(3, "flush_cache", [[b"t" * 1000]])))
        frontend.send(b"\x02", encode(Call(4, "flush_cache")))
        (good,) = received(link, 1)
        assert (good.call_id, link.refused) == (4, 2)


def test_the_internal_state_is_asked_of_the_loop_and_told_as_it_is():
    with bare_link() as (frontend, link):
        frontend.send(b"\x02", encode(GetInternalStateReq()))
        frontend.send(b"\x02", encode(SetInternalStateReq(server_args={"mixed_batch": False})))
        get, change = received(link, 2)
        assert (get.method, get.args) == ("get_internal_state", ())
        assert (change.method, change.args) == ("set_internal_state", ({"mixed_batch": False},))
        link.reply(CallReply(get.call_id, success=True, message='{"round": 7}'))
        link.reply(CallReply(change.call_id, success=False, message="no"))
        assert frontend.output() == ["GetInternalStateReqOutput", None, None, {"round": 7}]
        told = ["SetInternalStateReqOutput", None, None, False, {"mixed_batch": False}]
        assert frontend.output() == told


# --- beginnings and ends


def test_the_frontend_may_come_later_than_the_engine():
    earlier = BareFrontend()
    address = earlier.address
    earlier.close()
    link = Transport(address, registration())
    link.start()
    assert not link.ready(0.2)
    assert not link.closed
    frontend = BareFrontend(address)
    frontend.accept()
    assert link.ready(TIMEOUT_S)
    link.close()
    frontend.close()


def loads_sent(link, count):
    """Have the link send loads, each waking its thread up."""
    for _ in range(count):
        link.send(OutputColumns(), LOAD)
        time.sleep(0.005)


def test_what_is_sent_before_the_frontend_comes_shortens_no_wait(caplog):
    earlier = BareFrontend()
    address = earlier.address
    earlier.close()
    link = Transport(address, registration())
    link.start()
    loads_sent(link, 60)
    assert not link.closed
    assert not caplog.records
    frontend = BareFrontend(address)
    frontend.accept()
    assert frontend.output()[0] == "BatchTokenIDOutSlim"
    link.close()
    frontend.close()


def test_a_wait_for_the_frontend_is_reported_and_bounded(monkeypatch, caplog):
    monkeypatch.setattr("drumline.control.transport.link._REPORT_S", 0.1)
    monkeypatch.setattr("drumline.control.transport.link.INIT_TIMEOUT_S", 0.35)
    link = Transport("tcp://127.0.0.1:9", registration())
    link.start()
    with pytest.raises(PeerError, match=r"no frontend answered at tcp://127.0.0.1:9"):
        link.ready(TIMEOUT_S)
    assert 1 <= sum("still waiting" in record.message for record in caplog.records) <= 3
    link.close()


def test_what_is_sent_lengthens_no_wait_for_a_connection(monkeypatch):
    monkeypatch.setattr("drumline.control.transport.link.CONNECT_TIMEOUT_S", 0.3)
    frontend = BareFrontend()
    link = Transport(frontend.address, registration())
    link.start()
    identity, _ = frontend.handshake.recv_multipart()
    nowhere = Addresses(inputs=["tcp://127.0.0.1:9"], outputs=["tcp://127.0.0.1:9"])
    frontend.handshake.send_multipart([identity, encode(Init(addresses=nowhere))])
    loads_sent(link, 120)
    assert link.closed
    assert "cannot be reached" in link.failure
    link.close()
    frontend.close()


def test_a_link_that_waits_for_its_frontend_can_be_closed():
    link = Transport("tcp://127.0.0.1:9", registration())
    link.start()
    started = time.monotonic()
    link.close()
    link.close()
    assert time.monotonic() - started < 3
    assert link.closed


def test_an_init_that_makes_no_sense_ends_the_link():
    frontend = BareFrontend()
    link = Transport(frontend.address, registration())
    link.start()
    identity, _ = frontend.handshake.recv_multipart()
    frontend.handshake.send_multipart([identity, b"\x90"])
    with pytest.raises(PeerError):
        link.ready(TIMEOUT_S)
    assert link.closed
    link.close()
    frontend.close()


def test_the_engines_last_word_comes_behind_its_last_outputs():
    with bare_link() as (frontend, link):
        link.send(outputs(("r1", [1], "stop")), LOAD)
        link.close()
        assert frontend.output()[1] == ["r1"]
        assert frontend.outputs.recv() == ENGINE_CORE_DEAD


def test_a_frontend_that_goes_away_closes_the_link():
    with bare_link() as (frontend, link):
        assert not link.closed
        frontend.close()
        started = time.monotonic()
        assert link.receive(TIMEOUT_S) == []
        assert time.monotonic() - started < TIMEOUT_S
        assert link.closed
        assert "gone" in link.failure
        link.send(outputs(("r1", [1], "")), LOAD)


@run
async def test_an_engine_that_stops_ends_its_streams():
    async with linked() as (client, link):
        stream = client.submit(request())
        await asyncio.to_thread(received, link)
        await asyncio.to_thread(link.close)
        with pytest.raises(PeerError):
            await anext(stream)
        await client.closed.wait()
        with pytest.raises(PeerError):
            client.submit(request("r2"))


# --- many


@run
async def test_a_thousand_streams_at_once():
    streams, tokens = 1000, 5
    async with linked() as (client, link):

        def engine():
            rids = []
            while len(rids) < streams:
                rids += [message.request.rid for message in link.receive(0.1)]
            for step in range(tokens):
                reason = "stop" if step == tokens - 1 else ""
                for start in range(0, streams, 250):
                    rows = ((rid, [int(rid)], reason) for rid in rids[start : start + 250])
                    link.send(outputs(*rows), LOAD)

        served = asyncio.create_task(asyncio.to_thread(engine))

        async def consumed(rid):
            stream = client.submit(request(rid))
            return [i async for delta in stream for i in delta.token_ids]

        answers = await asyncio.gather(*(consumed(str(n)) for n in range(streams)))
        assert answers == [[n] * tokens for n in range(streams)]
        assert client.in_flight == 0
        await served
