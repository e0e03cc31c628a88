"""`drumline serve --gateway`: ranks, and a gateway of somebody else's that answers for them.

The gateway is the first to be stopped, so that what it still answers has its ranks.
"""

import asyncio
import contextlib

import setproctitle
import uvloop

from drumline.core.config import Config
from drumline.frontend import serve as http
from drumline.launcher.gateway import Gateway, check_gateway
from drumline.launcher.headless import done_first, prepared, stopping
from drumline.launcher.ranks import Ranks
from drumline.launcher.signals import Signals, first_of, stop_ranks
from drumline.launcher.telling import Say, steps_told

_TOGETHER_S = 1.0


def serve_behind_gateway(config: Config, say: Say) -> int:
    """Serve until a signal ends it; return the exit status.

    Raises ConfigError for what the operator can mend, PeerError when ranks or gateway fail.
    """
    setproctitle.setproctitle("drumline::serve")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, say))


async def _serve(config: Config, say: Say) -> int:
    signals = Signals(asyncio.get_running_loop())
    check_gateway(config)
    with contextlib.closing(http.listen(config.server)) as probe:
        # Taken early and given back: a port that is taken is named before ranks load.
        port = probe.getsockname()[1]
    config, files = prepared(config, say)
    ranks = Ranks(on_step=steps_told(say, config.parallel))
    gateway = Gateway(config, files, port)
    served = False
    try:
        gateway.start()
        ranks.start(config, gateway.handshake)
        if await done_first(_up(ranks, gateway, config.process.startup_timeout), signals):
            served = True
            say(f"drumline serve ready on {gateway.url}")
            await done_first(_lost(ranks, gateway), signals)
    finally:
        await _gateway_stopped(gateway, signals, config.process.drain_timeout if served else 0.0)
        await stop_ranks(stopping(ranks), ranks.kill, signals, served=served)
    return signals.status(served=served)


async def _up(ranks: Ranks, gateway: Gateway, timeout_s: float) -> None:
    """Wait until the ranks serve and the gateway answers for them. Raises when one fails."""
    ready = asyncio.create_task(ranks.ready(timeout_s))
    lost = asyncio.create_task(gateway.lost())
    try:
        await first_of(ready, lost)
        if not ready.done():
            raise lost.result()
        ready.result()
        await gateway.ready(timeout_s)
    finally:
        ready.cancel()
        lost.cancel()
        await asyncio.wait((ready, lost))


async def _lost(ranks: Ranks, gateway: Gateway) -> None:
    """Wait until ranks or gateway end by themselves; raise the error that says which and how."""
    tasks = [asyncio.create_task(ranks.lost()), asyncio.create_task(gateway.lost())]
    try:
        await first_of(*tasks)
        # Ranks end with their gateway, so its end is the cause where both have ended.
        await asyncio.wait(tasks, timeout=_TOGETHER_S)
        raise next(task.result() for task in reversed(tasks) if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _gateway_stopped(gateway: Gateway, signals: Signals, drain_s: float) -> None:
    """Stop the gateway; a second signal does so at once."""
    halting = asyncio.create_task(gateway.stop(drain_s))
    await first_of(halting, signals.second)
    if not halting.done():
        gateway.kill()
    await halting
