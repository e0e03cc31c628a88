"""HTTP workers as processes: their start, their end, and what becomes of the server."""

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from tests.fakes.engine import FakeEngine
from tests.fakes.http import TIMEOUT_S, until

from drumline.client.engine_client import EngineClient
from drumline.core.config import Config, ModelConfig, ProcessConfig, ServerConfig
from drumline.core.errors import ConfigError, PeerError
from drumline.core.model_files import find_model
from drumline.frontend.serve import listen, listen_for, url_of
from drumline.frontend.workers.hub import Hub
from drumline.launcher.workers import HANGS_S, STARTS_S, WORKER_COMMAND, Workers

SCRIPTED = (sys.executable, str(Path(__file__).with_name("scripted_worker.py")))


@asynccontextmanager
async def workers_of(
    count=2, command=WORKER_COMMAND, hangs_s=HANGS_S, starts_s=STARTS_S, **options
):
    """Yield the workers of a scripted engine, not started yet, and the engine."""
    config = Config(
        model=ModelConfig(model=str(find_model(None).path), served_model_name=("tiny",)),
        server=ServerConfig(port=0, api_server_count=count),
        process=ProcessConfig(log_level="warning"),
    )
    client = EngineClient()
    async with AsyncExitStack() as closing:
        fake = FakeEngine(await client.bind(), **options).start()
        closing.push_async_callback(client.close)
        closing.push_async_callback(asyncio.to_thread, fake.close)
        registration = await client.ready(TIMEOUT_S)
        hub = Hub(client, "tiny", None)
        closing.push_async_callback(hub.close)
        listeners = listen_for(config.server, count)
        for listener in listeners:
            closing.enter_context(listener)
        workers = Workers(
            config, registration, hub, listeners, command, hangs_s=hangs_s, starts_s=starts_s
        )
        closing.push_async_callback(workers.stop, 0)
        yield workers, fake, url_of(listeners[0], config.server)


def bounded(test):
    async def within():
        async with asyncio.timeout(60):
            await test()

    asyncio.run(within())


async def asked(url, tokens):
    """Complete a prompt over a connection of its own, which the kernel deals to some worker."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        body = {"prompt": [5], "max_tokens": tokens, "ignore_eos": True}
        return await http.post("/v1/completions", json=body)


def test_a_worker_that_is_killed_is_started_again_and_costs_its_own_requests_alone():
    async def test():
        async with workers_of(script=lambda _: [5] * 10_000,
                              step_s=0.02) as (workers, fake, url):  # fmt: skip
            one, other = (await started(workers)).pids
            running = [asyncio.create_task(asked(url, 1_900)) for _ in range(12)]
            await until(lambda: len(fake.requests) == 12)
            held = connections_of(one)
            os.kill(one, signal.SIGKILL)
            await until(lambda: len(fake.aborted) == held and workers.pids[0] != one)
            done, _ = await asyncio.wait(running, timeout=1)
            assert len(done) == held
            for task in done:
                assert isinstance(task.exception(), httpx.HTTPError)
            assert workers.pids[1] == other
            # Whichever worker these are dealt to, the new one's wait until it serves.
            replies = await asyncio.gather(*(asked(url, 3) for _ in range(8)))
            assert {reply.status_code for reply in replies} == {200}
            for task in set(running) - done:
                task.cancel()

    bounded(test)


def test_a_worker_that_hangs_is_killed_and_started_again():
    async def test():
        async with workers_of(1, hangs_s=1.0) as (workers, _, url):
            (pid,) = (await started(workers)).pids
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: workers.pids != [pid])
            assert (await asked(url, 1)).status_code == 200

    bounded(test)


def test_while_a_worker_is_stopped_the_others_take_its_connections_and_it_is_told(caplog):
    async def test():
        async with workers_of(2) as (workers, _, url):
            one, other = (await started(workers)).pids
            os.kill(one, signal.SIGSTOP)
            # Some are dealt to it before anybody knows, and wait for it no longer than that.
            early = [asyncio.create_task(asked(url, 1)) for _ in range(12)]
            assert {reply.status_code for reply in await asyncio.gather(*early)} == {200}
            assert "HTTP worker 0 has answered nothing for 2 s (stopped?)" in caplog.text
            late = [asyncio.create_task(asked(url, 1)) for _ in range(12)]
            assert {reply.status_code for reply in await asyncio.gather(*late)} == {200}
            assert workers.pids == [one, other], "nobody waited until it was killed"
            os.kill(one, signal.SIGCONT)
            await until(lambda: "HTTP worker 0 answers again" in caplog.text)
            assert (await asked(url, 1)).status_code == 200

    bounded(test)


def test_workers_drain_and_end_by_themselves():
    async def test():
        async with workers_of(script=lambda _: [5] * 50, step_s=0.02) as (workers, fake, url):
            pids = (await started(workers)).pids
            running = [asyncio.create_task(asked(url, 40)) for _ in range(4)]
            await until(lambda: len(fake.requests) == 4)
            await workers.stop(20)
            assert {(await each).status_code for each in running} == {200}
            assert not any(map(psutil.pid_exists, pids))

    bounded(test)


def test_workers_end_with_their_owner():
    async def test():
        async with workers_of() as (workers, _, _):
            pids = (await started(workers)).pids
            for end in list(workers._hub._workers):
                end.channel.close()  # what the kernel does when the owner is killed
            workers._stopping.set()
            await until(lambda: all(ended(pid) for pid in pids))

    bounded(test)


def test_a_worker_that_never_serves_fails_the_start():
    async def test():
        async with workers_of(command=SCRIPTED) as (workers, _, _):
            with pytest.raises(PeerError, match=r"HTTP worker . ended with status 7 before it"):
                await workers.start(20)

    bounded(test)


def test_a_worker_that_hangs_before_it_serves_is_killed_and_fails_the_start():
    async def test():
        hanging = (sys.executable, "-c", "import time; time.sleep(60)")
        async with workers_of(1, command=hanging, starts_s=0.5) as (workers, _, _):
            with pytest.raises(PeerError, match="HTTP worker 0 ended with status -9 before it"):
                await workers.start(20)

    bounded(test)


def test_workers_that_end_again_and_again_end_the_server():
    async def test():
        async with workers_of(1, command=(*SCRIPTED, "--serves")) as (workers, _, _):
            await workers.start(20)
            error = await workers.lost()
            assert "ended with status 7, the 4th within 60 s" in str(error)

    bounded(test)


def test_a_port_that_somebody_has_is_refused_however_many_workers_would_share_it():
    with listen(ServerConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="--port"):
            listen_for(ServerConfig(port=port), 2)
    shared = listen_for(ServerConfig(port=0), 2)
    try:
        port = shared[0].getsockname()[1]
        assert shared[1].getsockname()[1] == port
        with pytest.raises(ConfigError, match="--port"):
            listen_for(ServerConfig(port=port), 2)
    finally:
        for each in shared:
            each.close()


async def started(workers):
    await workers.start(TIMEOUT_S)
    return workers


def connections_of(pid):
    return sum(
        each.status == psutil.CONN_ESTABLISHED
        for each in psutil.Process(pid).net_connections("tcp")
    )


def ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
