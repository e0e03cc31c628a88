"""`python -m drumline.frontend.workers`: one HTTP worker's process, from settings to its end.

It ends with its owner: the kernel sees to that, and the end of the channel does.
"""

import asyncio
import logging
import os
import signal
import socket
import sys

import msgspec
import setproctitle
import uvloop

from drumline.core.config import LogLevel
from drumline.core.errors import ConfigError, PeerError
from drumline.core.lifeline import die_with
from drumline.core.log import configure
from drumline.core.model_files import find_model
from drumline.frontend.serve import SWITCH_S, serve
from drumline.frontend.service import Service, Timings
from drumline.frontend.text.load import load_tokenizer
from drumline.frontend.workers.link import SharedLink
from drumline.frontend.workers.settings import WorkerSettings, decode_settings

_log = logging.getLogger("drumline.worker")


def main() -> int:
    """Serve until the owner of the engine's link says or shows that it is over."""
    try:
        settings = decode_settings(sys.stdin.buffer.readline())
    except msgspec.DecodeError as error:
        sys.stderr.write(
            f"drumline.frontend.workers: no settings on standard input ({error}); workers are "
            "started by the launcher, see `drumline serve --api-server-count`\n"
        )
        return 2
    setproctitle.setproctitle(f"drumline::http{settings.index}")
    die_with(settings.launcher_pid)
    # The owner hears of Ctrl-C and says what is to be done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure(f"http{settings.index}", settings.config.process.log_level or LogLevel.INFO)
    sys.setswitchinterval(SWITCH_S)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings))
    except (ConfigError, PeerError) as error:
        _log.error("the worker stops: %s", error)
        return 1
    return 0


async def _serve(settings: WorkerSettings) -> None:
    config, timings = settings.config, Timings()
    link = SharedLink(
        config.parallel.data_parallel_size,
        timings.control_s,
        limited=config.server.max_concurrent_streams is not None,
    )
    await link.attach(socket.socket(fileno=settings.channel_fd))
    tokenizer = load_tokenizer(find_model(config.model.model))
    service = Service(
        config.server,
        config.model.served_model_name,
        link,
        settings.registration,
        tokenizer,
        chat=config.chat,
        seed=config.model.seed,
        config=config,
        timings=timings,
        shared=link,
    )
    listeners = {
        index: socket.socket(fileno=number) for index, number in enumerate(settings.listener_fds)
    }
    for each in listeners.values():
        each.setblocking(False)
    listener = listeners.pop(settings.index)
    stop = asyncio.Event()
    over = asyncio.create_task(_over(link, stop))
    await serve(
        service,
        listener,
        stop=stop,
        drain_timeout_s=config.process.drain_timeout,
        ready=lambda _: link.serving(),
        others=listeners,
        covered=link.covered,
    )
    over.cancel()
    if link.closed.is_set() and not link.drain.is_set():
        raise PeerError("the engine, or the owner of its link, is gone")


async def _over(link: SharedLink, stop: asyncio.Event) -> None:
    """Stop when the owner drains, or is gone; a dead engine is answered with 503 until then."""
    drain, lost = (asyncio.create_task(event.wait()) for event in (link.drain, link.channel.lost))
    await asyncio.wait((drain, lost), return_when=asyncio.FIRST_COMPLETED)
    for wait in (drain, lost):
        wait.cancel()
    stop.set()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
