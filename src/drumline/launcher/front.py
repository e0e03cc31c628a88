"""Who answers HTTP: this process by itself, or workers that share its link to the engine."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from drumline.frontend import serve as http
from drumline.frontend.service import Service
from drumline.frontend.workers.hub import Hub
from drumline.launcher.engine import Engine
from drumline.launcher.workers import STARTS_S, Workers


class Front(Protocol):
    """What serves an engine that runs."""

    async def serve(
        self, stop: asyncio.Event, drain_s: float, ready: Callable[[str], None]
    ) -> None:
        """Serve until `stop` is set, then drain; `ready` is told the URL.

        Raises PeerError when it cannot go on.
        """


class OneServer:
    """This process."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._service = service
        self._listener = listener

    async def serve(
        self, stop: asyncio.Event, drain_s: float, ready: Callable[[str], None]
    ) -> None:
        await http.serve(
            self._service, self._listener, stop=stop, drain_timeout_s=drain_s, ready=ready
        )


class SeveralServers:
    """Workers, of which each has a socket of its own on the same port."""

    def __init__(self, hub: Hub, workers: Workers, url: str) -> None:
        self._hub = hub
        self._workers = workers
        self._url = url

    @classmethod
    async def started(cls, engine: Engine, listeners: Sequence[socket.socket]) -> Self:
        """Bring the engine up, then the workers that `serve` will let end."""
        registration = await engine.registered()
        config = engine.config
        hub = Hub(
            engine.client, config.model.served_model_name[0], config.server.max_concurrent_streams
        )
        workers = Workers(config, registration, hub, listeners)
        try:
            await workers.start(STARTS_S)
        except BaseException:
            workers.kill()
            await workers.stop(0)
            await hub.close()
            raise
        return cls(hub, workers, http.url_of(listeners[0], config.server))

    async def serve(
        self, stop: asyncio.Event, drain_s: float, ready: Callable[[str], None]
    ) -> None:
        ready(self._url)
        stopped = asyncio.create_task(stop.wait())
        lost = asyncio.create_task(self._workers.lost())
        try:
            await asyncio.wait((stopped, lost), return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise lost.result()
            await self._workers.stop(drain_s)
        except asyncio.CancelledError:
            self._workers.kill()
            raise
        finally:
            stopped.cancel()
            lost.cancel()
            await self._workers.stop(0)
            await self._hub.close()
