"""The client against a scripted engine over loopback sockets."""

import asyncio
from contextlib import asynccontextmanager

from tests.fakes.engine import FakeEngine, registration

from drumline.client.engine_client import EngineClient
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
async def linked(engines=1, **options):
    client = EngineClient(engines)
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
async def test_the_registration_reaches_the_frontend():
    client = EngineClient()
    address = await client.bind()
    with FakeEngine(address, registers=registration(max_model_len=77)):
        assert (await client.ready(TIMEOUT_S)).max_model_len == 77
        await client.close()
