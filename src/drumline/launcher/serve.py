"""`drumline serve` as a process: the port, the engine, the HTTP server, and their end.

Order matters: the port is taken before any rank starts, the tokenizer loads while
the ranks do, and whatever happens, the engine is stopped last and once.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import setproctitle
import uvloop

from drumline.core.config import Config
from drumline.core.errors import PeerError
from drumline.core.log import configure
from drumline.frontend import serve as http
from drumline.launcher.engine import Engine
from drumline.launcher.signals import Signals

_log = logging.getLogger(__name__)

_SIGNALLED = 128
_STOP_S = 5.0

Say = Callable[[str], None]


def serve(config: Config, say: Say) -> int:
    """Serve until a signal ends it; return the exit status.

    `say` is told what an operator waits for, a line each. Raises ConfigError for what
    the operator can mend, PeerError when the engine fails.
    """
    setproctitle.setproctitle("drumline::serve")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, say))


async def _serve(config: Config, say: Say) -> int:
    signals = Signals(asyncio.get_running_loop())
    with contextlib.closing(http.listen(config.server)) as listener:
        engine = Engine(config, quiet=False, on_step=lambda rank, step: say(f"rank {rank}: {step}"))
        configure("serve", engine.config.process.log_level or "info")
        if engine.files.embedded:
            say(f"no model was named: serving the embedded {engine.files.name}")
        async with _stopped_once(engine, signals):
            await _until_signalled(engine, listener, signals, say)
    if signals.second.done():
        return _SIGNALLED + signals.second.result()
    return 0


@contextlib.asynccontextmanager
async def _stopped_once(engine: Engine, signals: Signals) -> AsyncIterator[None]:
    """On leaving, stop the engine, at once where a second signal came."""
    try:
        yield
    finally:
        grace_s = 0.0 if signals.second.done() else _STOP_S
        stopping = asyncio.create_task(engine.stop(grace_s))
        await _first_of(stopping, signals.second)
        if not stopping.done():
            engine.ranks.kill()
        await stopping


async def _until_signalled(
    engine: Engine, listener: socket.socket, signals: Signals, say: Say
) -> None:
    """Bring the engine up and answer requests until a signal; raise when the engine fails."""
    starting = asyncio.create_task(engine.service())
    await _first_of(starting, signals.first)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return
    service = starting.result()
    stop = asyncio.Event()
    serving = asyncio.create_task(
        http.serve(
            service,
            listener,
            stop=stop,
            drain_timeout_s=engine.config.process.drain_timeout,
            ready=lambda url: say(f"drumline serve ready on {url}"),
        )
    )
    lost = asyncio.create_task(engine.lost())
    await _first_of(serving, lost, signals.first)
    stop.set()
    # A dead engine ends the requests' streams, so draining then takes no time.
    await _first_of(serving, signals.second)
    if not serving.done():
        serving.cancel()
        await asyncio.wait((serving,))
        return
    lost.cancel()
    await asyncio.wait((lost,))
    serving.result()
    if not lost.cancelled():
        raise lost.result()
    if not signals.first.done():
        raise PeerError("the HTTP server ended by itself; its log is above")


async def _first_of(*waits: asyncio.Future[Any]) -> None:
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
