"""Several HTTP workers of a scripted engine, all in one process, over real sockets."""

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager

import httpx

from drumline.client.engine_client import EngineClient
from drumline.core.config import ServerConfig
from drumline.frontend.serve import listen, serve, url_of
from drumline.frontend.service import Service, Timings
from drumline.frontend.workers.hub import Hub
from drumline.frontend.workers.link import SharedLink
from tests.fakes.engine import FakeEngine
from tests.fakes.http import TIMEOUT_S


class Worker:
    """One worker: its server, and a client that speaks to it alone."""

    def __init__(self, link, service, http, serving):
        self.link = link
        self.service = service
        self.http = http
        self.serving = serving

    async def complete(self, headers=None, **body):
        return await self.http.post("/v1/completions", json=body, headers=headers)

    def dies(self):
        """End the channel, as the end of the process would."""
        self.link.channel.close()


class SharedServer:
    """What a test needs of several workers and what they share."""

    def __init__(self, fake, client, hub):
        self.fake = fake
        self.client = client
        self.hub = hub
        self.workers = []


@asynccontextmanager
async def served_by_workers(
    tokenizer,
    count=2,
    *,
    says="Hello there!",
    most=None,
    timings=None,
    drain_timeout_s=1.0,
    **options,
):
    """Serve a scripted engine that says `says` with `count` workers."""
    script = says if callable(says) else lambda _: tokenizer.encode(says, add_special=False)
    timings = timings or Timings()
    client = EngineClient()
    fake = FakeEngine(await client.bind(), script=script, **options).start()
    async with AsyncExitStack() as closing:
        closing.push_async_callback(client.close)
        closing.push_async_callback(asyncio.to_thread, fake.close)
        known = await client.ready(TIMEOUT_S)
        hub = Hub(client, "tiny", most, timings)
        closing.push_async_callback(hub.close)
        server = SharedServer(fake, client, hub)
        for _ in range(count):
            worker = await _worker(server, known, tokenizer, most, timings, drain_timeout_s)
            closing.push_async_callback(_ended, worker)
            await closing.enter_async_context(worker.http)
        yield server


async def _worker(server, known, tokenizer, most, timings, drain_timeout_s):
    ours, theirs = socket.socketpair()
    end = await server.hub.attach(len(server.workers), ours)
    link = SharedLink(1, timings.control_s, limited=most is not None)
    await link.attach(theirs)
    config = ServerConfig(host="127.0.0.1", port=0)
    service = Service(config, ("tiny",), link, known, tokenizer, timings=timings, shared=link)
    listener = listen(config)
    serving = asyncio.create_task(
        serve(
            service, listener, stop=link.drain, drain_timeout_s=drain_timeout_s,
            ready=lambda _: link.serving(),
        )
    )  # fmt: skip
    await end.serving.wait()
    http = httpx.AsyncClient(base_url=url_of(listener, config), timeout=TIMEOUT_S)
    worker = Worker(link, service, http, serving)
    server.workers.append(worker)
    return worker


async def _ended(worker):
    worker.link.drain.set()
    worker.link.all_idle.set()
    await asyncio.wait((worker.serving,))
    worker.link.channel.close()
