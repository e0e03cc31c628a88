"""Ranks without a server: another frontend drives them, somebody else's or the first machine's.

They dial the frontend, which may start before them or after, and end with it: a link that is
gone is not dialled again. Whoever restarts this process has its ranks register anew.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import setproctitle
import uvloop

from drumline.core.config import Config
from drumline.core.log import configure
from drumline.core.model_files import ModelFiles, find_model
from drumline.launcher.checks import check
from drumline.launcher.engine import settled
from drumline.launcher.ranks import Ranks
from drumline.launcher.signals import Signals, stop_ranks, unless_signalled
from drumline.launcher.telling import Say, steps_told

_LEAST_GRACE_S = 5.0


def serve_headless(config: Config, say: Say) -> int:
    """Run the ranks until a signal or their frontend ends them; return the exit status.

    Raises ConfigError for what the operator can mend, PeerError when a rank fails or the
    frontend is gone.
    """
    node = f"_node{config.parallel.node}" if config.parallel.nodes > 1 else ""
    setproctitle.setproctitle(f"drumline::headless{node}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, say))


async def _serve(config: Config, say: Say) -> int:
    signals = Signals(asyncio.get_running_loop())
    config, _ = prepared(config, say)
    ranks = Ranks(on_step=steps_told(say, config.parallel))
    served = False
    try:
        # Other machines than the first are told by rank 0 where the frontend is.
        ranks.start(config, config.frontend.handshake if config.parallel.node == 0 else "")
        if await done_first(ranks.ready(config.process.startup_timeout), signals):
            served = True
            say(f"drumline serve ready: {_whose(config)}")
            await done_first(_over(ranks), signals)
    finally:
        await stop_ranks(stopping(ranks), ranks.kill, signals, served=served)
    return signals.status(served=served) if signals.first.done() else 0


def _whose(config: Config) -> str:
    parallel = config.parallel
    who = "1 rank" if parallel.local_ranks == 1 else f"{parallel.local_ranks} ranks"
    if parallel.node > 0:
        return f"{who} of node {parallel.node} of {parallel.nodes}"
    return f"{who} for the frontend at {config.frontend.handshake}"


def prepared(config: Config, say: Say) -> tuple[Config, ModelFiles]:
    """Return `config` with nothing left open, and the model's files. Raises ConfigError."""
    files = find_model(config.model.model)
    check(config, files)
    config = settled(config, files, quiet=False)
    configure("serve", config.process.log_level or "info")
    if files.embedded:
        say(f"no model was named: serving the embedded {files.name}")
    return config, files


async def done_first(work: Coroutine[Any, Any, Any], signals: Signals) -> bool:
    """Whether `work` ended before a signal came, which cancels it. Raises what it raised."""
    done = await unless_signalled(work, signals)
    if done is None:
        return False
    done.result()
    return True


def stopping(ranks: Ranks) -> Callable[[float | None], Coroutine[Any, Any, None]]:
    """Return what stops ranks that have nothing to drain; the frontend has what they answer."""

    async def stop(grace_s: float | None) -> None:
        await ranks.stop(_LEAST_GRACE_S if grace_s is None else grace_s)

    return stop


async def _over(ranks: Ranks) -> None:
    """Wait for the ranks' end; raise where it was none of their own."""
    error = await ranks.over()
    if error is not None:
        raise error
