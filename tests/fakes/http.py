"""The HTTP server of a scripted engine, over real sockets, for the length of a test."""

import asyncio
import functools
import json
from contextlib import asynccontextmanager

import httpx

from drumline.client.engine_client import EngineClient
from drumline.core.config import ServerConfig
from drumline.frontend.app import entries
from drumline.frontend.serve import listen, serve, url_of
from drumline.frontend.service import Service, Timings
from tests.fakes.engine import FakeEngine, registration

TIMEOUT_S = 20
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


class Served:
    """What a test needs of a running server."""

    def __init__(self, url, http, service, fakes, stop, serving):
        self.url = url
        self.http = http
        self.service = service
        self.fake = fakes[0]
        self.fakes = fakes
        self.stop = stop
        self.serving = serving

    async def chat(self, headers=None, **changes):
        return await self.http.post("/v1/chat/completions", json=CHAT | changes, headers=headers)

    async def complete(self, **body):
        return await self.http.post("/v1/completions", json=body)

    def streaming(self, path="/v1/chat/completions", headers=None, **body):
        body = (CHAT if path.endswith("chat/completions") else {}) | {"stream": True} | body
        return self.http.stream("POST", path, json=body, headers=headers)

    async def events(self, path="/v1/chat/completions", **body):
        """Return the events of a stream, decoded; the sentinel as it is."""
        async with self.streaming(path, **body) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            return events_of((await response.aread()).decode())

    async def metrics(self):
        """Return the samples of /metrics, by name and labels as they are written."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}


def events_of(text):
    events = [event for event in text.split("\n\n") if event]
    assert all(event.startswith(("data: ", ": ")) for event in events)
    data = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


@asynccontextmanager
async def served(
    tokenizer,
    *,
    says="Hello there!",
    names=("tiny",),
    timings=None,
    registers=None,
    server=None,
    chat=None,
    drain_timeout_s=1.0,
    engines=1,
    policy=None,
    **options,
):
    """Serve scripted engines that say `says`, a text or a script."""
    script = says if callable(says) else lambda _: tokenizer.encode(says, add_special=False)
    client = EngineClient(engines, policy=policy)
    address = await client.bind()
    known = registration(**(registers or {}))
    fakes = [
        FakeEngine(address, index=index, script=script, registers=known, **options).start()
        for index in range(engines)
    ]
    stop = asyncio.Event()
    try:
        service = Service(
            server or ServerConfig(host="127.0.0.1", port=0),
            names,
            client,
            await client.ready(TIMEOUT_S),
            tokenizer,
            chat=chat,
            timings=timings or Timings(),
        )
        listener = listen(service.server)
        url = url_of(listener, service.server)
        ready = asyncio.Event()
        serving = asyncio.create_task(
            serve(
                service,
                listener,
                stop=stop,
                drain_timeout_s=drain_timeout_s,
                ready=lambda _: ready.set(),
            )
        )
        try:
            begun = asyncio.create_task(ready.wait())
            await asyncio.wait((begun, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                begun.cancel()
                serving.result()  # why it did not begin
            async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=False) as http:
                yield Served(url, http, service, fakes, stop, serving)
        finally:
            stop.set()
            await asyncio.wait((serving,))
            if not serving.cancelled():
                serving.result()
    finally:
        for fake in fakes:
            await asyncio.to_thread(fake.close)
        await client.close()


def run(test):
    """Run an async test in a loop of its own, bounded; its fixtures stay its arguments."""

    @functools.wraps(test)
    def bounded(**fixtures):
        async def main():
            async with asyncio.timeout(TIMEOUT_S):
                await test(**fixtures)

        asyncio.run(main())

    return bounded


async def until(condition):
    while not condition():  # noqa: ASYNC110  what is awaited happens on a thread
        await asyncio.sleep(0.005)


def routes_of(tokenizer):
    """Return every route of a server, which need not run for that."""
    client = EngineClient()
    service = Service(ServerConfig(), ("tiny",), client, registration(), tokenizer)
    try:
        return entries(service)
    finally:
        service.close()
        asyncio.run(client.close())
