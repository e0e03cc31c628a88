"""The client against a scripted engine over loopback sockets."""

import asyncio
import tempfile
from contextlib import asynccontextmanager

import pytest
import zmq
from tests.fakes.engine import FakeEngine, registration

from drumline.client.engine_client import EngineClient
from drumline.client.routing import pinned
from drumline.core.errors import ConfigError, PeerError, RequestError
from drumline.wire.codec import encode
from drumline.wire.output import BatchTokenIDOutSlim
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams

TIMEOUT_S = 10


def request(rid="r1", ids=(1, 2, 3), **changes):
    limit = changes.pop("max_new_tokens", None)
    params = SamplingParams(max_new_tokens=limit)
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=list(ids), sampling_params=params, **changes
    )


@asynccontextmanager
async def linked(engines=1, *, policy=None, clock=None, **options):
    client = EngineClient(engines, policy=policy, clock=clock)
    address = await client.bind()
    fakes = [FakeEngine(address, index=index, **options).start() for index in range(engines)]
    try:
        await client.ready(TIMEOUT_S)
        yield client, *fakes
    finally:
        await client.close()
        for fake in fakes:
            await asyncio.to_thread(fake.close)


def run(test):
    """Run an async test in a loop of its own, bounded."""

    def bounded():
        async def main():
            async with asyncio.timeout(20):
                await test()

        asyncio.run(main())

    bounded.__name__ = test.__name__
    return bounded


async def collected(stream):
    return [delta async for delta in stream]


async def until(condition):
    while not condition():  # noqa: ASYNC110  what is awaited happens on a thread
        await asyncio.sleep(0.002)


class ManualClock:
    def __init__(self):
        self.us = 10_000_000

    def now_us(self):
        return self.us


# --- streams


@run
async def test_an_answer_streams_token_by_token():
    async with linked(cached_tokens=2) as (client, engine):
        deltas = await collected(client.submit(request(ids=[5, 6, 7])))
        assert [i for d in deltas for i in d.token_ids] == [5, 6, 7]
        last = deltas[-1]
        assert (last.finished_reason, last.prompt_tokens, last.completion_tokens) == ("stop", 3, 3)
        assert last.cached_tokens == 2
        assert client.in_flight == 0
        assert engine.requests[0].rid == "r1"


@run
async def test_log_probabilities_come_beside_their_tokens():
    async with linked() as (client, _):
        asked = request(ids=[5, 6], return_logprob=True, top_logprobs_num=2)
        deltas = await collected(client.submit(asked))
        assert [i for d in deltas for i in d.logprob_ids] == [5, 6]
        assert [v for d in deltas for v in d.logprobs] == [-0.5, -0.5]
        assert [i for d in deltas for i in d.top_logprob_ids] == [[5, 6], [6, 7]]
        assert [v for d in deltas for v in d.top_logprobs] == [[-0.5, -1.5], [-0.5, -1.5]]


@run
async def test_a_slow_consumer_gets_one_delta_that_holds_everything():
    async with linked() as (client, _):
        slow = client.submit(request(ids=range(200), return_logprob=True))
        await until(lambda: slow.ended)
        deltas = await collected(slow)
        assert len(deltas) == 1
        assert deltas[0].token_ids == list(range(200)) == deltas[0].logprob_ids
        assert len(deltas[0].logprobs) == 200
        assert (deltas[0].finished_reason, deltas[0].completion_tokens) == ("stop", 200)


@run
async def test_a_refusal_says_why():
    def refuse(request):
        return {"message": "too long", "status_code": 400}

    async with linked(refuse=refuse) as (client, _):
        (delta,) = await collected(client.submit(request()))
        assert delta.finished_reason == "abort"
        assert delta.details == {"message": "too long", "status_code": 400}


@run
async def test_leaving_a_stream_early_aborts_it_once():
    async with linked(script=lambda request: iter(int, 1), step_s=0.002) as (client, engine):
        async with client.submit(request()) as stream:
            await anext(stream)
        stream.abort()
        stream.abort()
        assert await collected(stream) == []
        await until(lambda: engine.aborted)
        await collected(client.submit(request("r2", max_new_tokens=3)))
        assert engine.aborted == ["r1"]


@run
async def test_an_ended_stream_is_not_aborted():
    async with linked() as (client, engine):
        async with client.submit(request()) as stream:
            await collected(stream)
        stream.abort()
        await client.call("flush_cache")
        assert engine.aborted == []


@run
async def test_a_consumer_that_is_cancelled_leaves_the_stream_usable():
    async with linked() as (client, engine):
        engine.held.set()
        stream = client.submit(request(ids=[4]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.02)
        engine.held.clear()
        assert [i for d in await collected(stream) for i in d.token_ids] == [4]


@run
async def test_an_id_in_flight_is_refused_and_the_first_keeps_its_stream():
    async with linked() as (client, engine):
        engine.held.set()
        first = client.submit(request(ids=[1]))
        with pytest.raises(RequestError) as refusal:
            client.submit(request(ids=[2]))
        assert refusal.value.status == 409
        engine.held.clear()
        assert [i for d in await collected(first) for i in d.token_ids] == [1]
        assert len(engine.requests) == 1
        await collected(client.submit(request(ids=[3])))


@pytest.mark.parametrize("rid", [None, "", ["a", "b"]])
def test_a_request_without_one_id_is_refused(rid):
    @run
    async def test():
        async with linked() as (client, _):
            with pytest.raises(RequestError):
                client.submit(request(rid))

    test()


@run
async def test_what_no_message_can_hold_is_refused_and_nothing_waits_for_it():
    deep = []
    for _ in range(5000):
        deep = [deep]
    async with linked() as (client, engine):
        for fields in (
            {"data_parallel_rank": 2**64},
            {"input_text": "\udc00"},
            {"input_extra_infos": [{"a": deep}]},
        ):
            with pytest.raises(RequestError, match="cannot be sent") as refusal:
                client.submit(request(**fields))
            assert refusal.value.status == 400
        with pytest.raises(RequestError, match="cannot be sent"):
            await client.call("pause_scheduler", "\udc00")
        assert client.in_flight == 0
        await collected(client.submit(request()))
        assert (len(engine.requests), engine.calls) == (1, [])


# --- several engines


@run
async def test_engines_take_turns():
    async with linked(engines=2) as (client, *engines):
        streams = [client.submit(request(f"r{n}")) for n in range(7)]
        await asyncio.gather(*map(collected, streams))
        assert [len(engine.requests) for engine in engines] == [4, 3]


@run
async def test_a_pin_chooses_the_engine():
    async with linked(engines=2) as (client, *engines):
        for n in range(3):
            await collected(client.submit(request(f"r{n}", data_parallel_rank=1)))
        assert [len(engine.requests) for engine in engines] == [0, 3]


@pytest.mark.parametrize("rank", [2, -1, True, 0.0, "0"])
def test_a_pin_to_no_engine_is_refused(rank):
    with pytest.raises(RequestError, match="data_parallel_rank"):
        pinned(rank, 2)


def test_a_lone_engine_ignores_pins():
    assert pinned(7, 1) is None


@run
async def test_an_abort_goes_to_the_engine_that_runs_the_request():
    async with linked(engines=2, script=lambda request: iter(int, 1)) as (client, *engines):
        async with client.submit(request(data_parallel_rank=1)) as stream:
            await anext(stream)
        await until(lambda: engines[1].aborted)
        assert engines[0].aborted == []


# --- calls and loads


@run
async def test_a_call_asks_every_engine_and_returns_its_replies_in_order():
    def answer(method, *args):
        return (method == "flush_cache", f"{method}{args}")

    async with linked(engines=2, on_call=answer) as (client, *engines):
        replies = await client.call("flush_cache", 0.5)
        assert [reply.engine_index for reply in replies] == [0, 1]
        assert all(reply.success for reply in replies)
        assert replies[0].message == "flush_cache(0.5,)"
        (first, _) = await client.call("unknown")
        assert not first.success
        assert engines[1].calls == [("flush_cache", 0.5), ("unknown",)]


@run
async def test_a_call_that_nobody_answers_ends_at_its_time_limit():
    async with linked(on_call=lambda method, *args: None) as (client, _):
        with pytest.raises(PeerError, match="flush_cache"):
            await client.call("flush_cache", timeout_s=0.05)


@run
async def test_loads_are_shown_while_every_engine_s_is_fresh():
    clock = ManualClock()
    client = EngineClient(2, clock=clock)
    address = await client.bind()
    assert client.loads == ()
    with FakeEngine(address, index=0):
        await asyncio.sleep(0.1)
        assert client.loads == ()
        with FakeEngine(address, index=1):
            await client.ready(TIMEOUT_S)
            await until(lambda: client.loads)
            assert [load.kv_total_pages for load in client.loads] == [512, 512]
            assert client.last_output_age_s == 0
            clock.us += 2_999_999
            assert len(client.loads) == 2
            clock.us += 1
            assert client.loads == ()
            assert client.last_output_age_s == 3
            await collected(client.submit(request()))
            assert client.last_output_age_s == 0
            await client.close()


# --- engines that misbehave


def batch(**changes):
    columns = {
        "rids": ["r1"],
        "output_ids": [[9]],
        "finished_reasons": ["stop"],
        "prompt_tokens": [1],
        "completion_tokens": [1],
        "cached_tokens": [0],
        "output_token_logprobs_val": [[]],
        "output_token_logprobs_idx": [[]],
    }
    return encode(BatchTokenIDOutSlim(**(columns | changes)))


@run
async def test_malformed_batches_are_dropped_whole_and_counted():
    async with linked() as (client, engine):
        engine.held.set()
        stream = client.submit(request(ids=[1]))
        hostile = [
            b"",
            b"\xc1",
            batch()[:-1],
            batch(cached_tokens=[]),
            batch(finish_reason_details=[None, None]),
            batch(finished_reasons=[None]),
            batch(engine_index=1),
            batch(engine_index=-1),
            encode(["HealthCheckOutput", None, None]),
        ]
        for payload in hostile:
            engine.send_raw(payload)
        await until(lambda: client.dropped_frames == len(hostile))
        engine.held.clear()
        assert [i for d in await collected(stream) for i in d.token_ids] == [1]


@run
async def test_rows_of_requests_nobody_waits_for_are_ignored():
    async with linked() as (client, engine):
        engine.send_raw(batch(rids=["stranger"]))
        await collected(client.submit(request()))
        assert client.dropped_frames == 0


@run
async def test_an_unknown_reason_counts_as_stop():
    async with linked() as (client, engine):
        engine.held.set()
        stream = client.submit(request())
        await until(lambda: engine.requests)
        engine.send_raw(batch(finished_reasons=["bored"]))
        (delta,) = await collected(stream)
        assert delta.finished_reason == "stop"


@run
async def test_strangers_at_the_sockets_harm_nobody():
    client = EngineClient()
    address = await client.bind()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.identity = b"\x05\x00"
    stranger.connect(address)
    for frames in ([b"\xc1"], [encode({"status": "HELLO"})], [b"a", b"b"]):
        stranger.send_multipart(frames)
    await until(lambda: client.dropped_frames == 3)
    stranger.close(0)
    context.term()
    with FakeEngine(address):
        await client.ready(TIMEOUT_S)
        await collected(client.submit(request()))
        await client.close()


@run
async def test_an_engine_that_declares_another_order_is_refused():
    client = EngineClient()
    address = await client.bind()
    layouts = {"ControlReplySlim": ["success", "call_id"]}
    with FakeEngine(address, registers=registration(positional_layouts=layouts)):
        with pytest.raises(PeerError, match="ControlReplySlim"):
            await client.ready(TIMEOUT_S)
        await client.close()


# --- beginnings and ends


@run
async def test_the_registration_reaches_the_frontend():
    client = EngineClient()
    address = await client.bind()
    with FakeEngine(address, registers=registration(max_model_len=77)):
        assert (await client.ready(TIMEOUT_S)).max_model_len == 77
        await client.close()


@run
async def test_waiting_for_an_engine_is_bounded_and_names_it():
    client = EngineClient(2)
    address = await client.bind()
    with FakeEngine(address, index=1) as engine:
        await asyncio.to_thread(engine.registered.wait, TIMEOUT_S)
        with pytest.raises(PeerError, match=r"\[0\]"):
            await client.ready(0.1)
        with pytest.raises(PeerError):
            client.submit(request())
        await client.close()


@run
async def test_an_address_in_use_is_the_operator_s_error():
    client = EngineClient()
    address = await client.bind()
    other = EngineClient()
    with pytest.raises(ConfigError, match="cannot be bound"):
        await other.bind(address)
    await client.close()


@pytest.mark.parametrize("address", ["tcp://*:5555", "udp://127.0.0.1:1", "nonsense"])
def test_an_address_that_no_engine_can_dial_is_refused(address):
    async def test():
        client = EngineClient()
        with pytest.raises(ConfigError):
            await client.bind(address)
        await client.close()

    asyncio.run(test())


@run
async def test_paths_serve_as_addresses():
    with tempfile.TemporaryDirectory() as folder:
        client = EngineClient()
        address = await client.bind(f"ipc://{folder}/engine")
        with FakeEngine(address):
            await client.ready(TIMEOUT_S)
            await collected(client.submit(request()))
            await client.close()


@pytest.mark.parametrize("sentinel", [True, False], ids=["said so", "killed"])
def test_an_engine_s_end_ends_everything(sentinel):
    @run
    async def test():
        silent = {"on_call": lambda method, *args: None}
        async with linked(script=lambda request: iter(int, 1), **silent) as (client, engine):
            stream = client.submit(request())
            call = asyncio.create_task(client.call("flush_cache"))
            await until(lambda: engine.calls)
            await asyncio.to_thread(engine.close, sentinel=sentinel)
            with pytest.raises(PeerError):
                await collected(stream)
            with pytest.raises(PeerError):
                await call
            assert client.closed.is_set()
            assert client.in_flight == 0
            with pytest.raises(PeerError):
                client.submit(request("r2"))
            with pytest.raises(PeerError):
                await client.ready(1)
            stream.abort()

    test()


@run
async def test_closing_the_client_aborts_what_runs_and_ends_its_streams():
    async with linked(script=lambda request: iter(int, 1)) as (client, engine):
        stream = client.submit(request())
        await anext(stream)
        await client.close()
        with pytest.raises(PeerError):
            await collected(stream)
        await until(lambda: engine.aborted == ["r1"])
        await client.close()
