"""`drumline serve` as a process: the port, the engine, the HTTP server, and their end.

Order matters: the port is taken before any rank starts, the tokenizer loads while
the ranks do, and whatever happens, the engine is stopped last and once.
"""

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Sequence

import setproctitle
import uvloop

from drumline.core.config import Config
from drumline.core.errors import PeerError
from drumline.core.log import configure
from drumline.frontend import serve as http
from drumline.launcher.engine import Engine
from drumline.launcher.front import Front, OneServer, SeveralServers
from drumline.launcher.rank_process import Ahead
from drumline.launcher.signals import Signals, first_of, stop_ranks, unless_signalled
from drumline.launcher.telling import Say, steps_told

_log = logging.getLogger(__name__)


def serve(config: Config, say: Say, ahead: Ahead | None = None) -> int:
    """Serve until a signal ends it; return the exit status.

    `say` is told what an operator waits for, a line each. Raises ConfigError for what
    the operator can mend, PeerError when the engine fails. A lone rank may have been started
    `ahead`.
    """
    setproctitle.setproctitle("drumline::serve")
    sys.setswitchinterval(http.SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, say, ahead))


async def _serve(config: Config, say: Say, ahead: Ahead | None) -> int:
    signals = Signals(asyncio.get_running_loop())
    http.check(config.server)
    with contextlib.ExitStack() as closing:
        count = config.server.api_server_count
        listeners = (
            [http.listen(config.server)] if count == 1 else http.listen_for(config.server, count)
        )
        for listener in listeners:
            closing.enter_context(listener)
        steps = steps_told(say, config.parallel)
        engine = Engine(config, quiet=False, on_step=steps, ahead=ahead)
        configure("serve", engine.config.process.log_level or "info")
        if engine.files.embedded:
            say(f"no model was named: serving the embedded {engine.files.name}")
        served = False
        try:
            front = await _started(engine, listeners, signals)
            if front is not None:
                served = True
                await _until_signalled(engine, front, signals, say)
        finally:
            await stop_ranks(engine.stop, engine.ranks.kill, signals, served=served)
    return signals.status(served=served)


async def _started(
    engine: Engine, listeners: Sequence[socket.socket], signals: Signals
) -> Front | None:
    """Bring the engine up, and who answers HTTP; None when a signal came first.

    Raises when the engine fails.
    """
    started = await unless_signalled(_front(engine, listeners), signals)
    return None if started is None else started.result()


async def _front(engine: Engine, listeners: Sequence[socket.socket]) -> Front:
    if len(listeners) == 1:
        return OneServer(await engine.service(), listeners[0])
    return await SeveralServers.started(engine, listeners)


async def _until_signalled(engine: Engine, front: Front, signals: Signals, say: Say) -> None:
    """Answer requests until a signal; raise when the engine fails."""
    stop = asyncio.Event()
    serving = asyncio.create_task(
        front.serve(
            stop,
            engine.config.process.drain_timeout,
            lambda url: say(f"drumline serve ready on {url}"),
        )
    )
    lost = asyncio.create_task(engine.lost())
    await first_of(serving, lost, signals.first)
    stop.set()
    # A dead engine ends the requests' streams, so draining then takes no time.
    await first_of(serving, signals.second)
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
