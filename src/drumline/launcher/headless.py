"""Ranks without a server: somebody else's frontend drives them.

They dial the frontend, which may start before them or after, and end with it: a link that is
gone is not dialled again. Whoever restarts this process has its ranks register anew.
"""

import asyncio

import setproctitle
import uvloop

from drumline.core.config import Config
from drumline.core.log import configure
from drumline.core.model_files import find_model
from drumline.launcher.checks import check
from drumline.launcher.engine import settled
from drumline.launcher.ranks import Ranks
from drumline.launcher.signals import Signals, first_of, stop_ranks
from drumline.launcher.telling import Say, steps_told

_LEAST_GRACE_S = 5.0


def serve_headless(config: Config, say: Say) -> int:
    """Run the ranks until a signal or their frontend ends them; return the exit status.

    Raises ConfigError for what the operator can mend, PeerError when a rank fails or the
    frontend is gone.
    """
    setproctitle.setproctitle("drumline::headless")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, say))


async def _serve(config: Config, say: Say) -> int:
    signals = Signals(asyncio.get_running_loop())
    files = find_model(config.model.model)
    check(config, files)
    config = settled(config, files, quiet=False)
    configure("serve", config.process.log_level or "info")
    if files.embedded:
        say(f"no model was named: serving the embedded {files.name}")
    count = config.parallel.local_ranks
    ranks = Ranks(on_step=steps_told(say, count))
    served = False
    try:
        ranks.start(config, config.frontend.handshake)
        ready = asyncio.create_task(ranks.ready(config.process.startup_timeout))
        await first_of(ready, signals.first)
        if ready.done():
            ready.result()
            served = True
            who = "1 rank" if count == 1 else f"{count} ranks"
            say(f"drumline serve ready: {who} for the frontend at {config.frontend.handshake}")
            await _until_over(ranks, signals)
        else:
            ready.cancel()
            await asyncio.wait((ready,))
    finally:

        async def stop(grace_s: float | None) -> None:
            await ranks.stop(_LEAST_GRACE_S if grace_s is None else grace_s)

        await stop_ranks(stop, ranks.kill, signals, served=served)
    return signals.status(served=served) if signals.first.done() else 0


async def _until_over(ranks: Ranks, signals: Signals) -> None:
    """Wait for a signal, or for the ranks' end; raise where that was none of their own."""
    over = asyncio.create_task(ranks.over())
    await first_of(over, signals.first)
    if not over.done():
        over.cancel()
        await asyncio.wait((over,))
        return
    error = over.result()
    if error is not None:
        raise error
