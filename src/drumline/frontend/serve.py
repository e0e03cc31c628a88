"""Serving the application: the socket, the server, and how it stops.

Stopping is in two steps. Draining: the socket stays open, new requests get 503, what
runs may finish until the drain's time is over. Then the listener and what is left of
the connections are closed.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping

import uvicorn
from starlette.types import ASGIApp

from drumline.core.config import ServerConfig
from drumline.core.errors import ConfigError
from drumline.frontend.access import Keys
from drumline.frontend.app import create_app
from drumline.frontend.service import Service

log = logging.getLogger(__name__)

SWITCH_S = 0.001
"""How long a thread that computes, such as one that tokenizes, may keep the interpreter from the
event loop, which gives it away at every look at its sockets. For processes that serve HTTP."""

_BACKLOG = 2048
_LAST_WORDS_S = 2


def listen(server: ServerConfig) -> socket.socket:
    """Return a socket that listens on the configured address.

    It listens from the start, so that no other server can take the port while the model
    loads; whoever connects early waits until connections are answered.
    Raises ConfigError naming `--port` or `--host` when it cannot be bound.
    """
    return _listening(server, server.port, shared=False)


def listen_for(server: ServerConfig, workers: int) -> list[socket.socket]:
    """Return a listening socket for each worker, all on the configured address.

    The kernel deals connections out among them. Raises ConfigError as `listen` does.
    """
    # Alone for a moment, which is refused where somebody has the port, shared or not.
    with _listening(server, server.port, shared=False) as first:
        port = first.getsockname()[1]
    return [_listening(server, port, shared=True) for _ in range(workers)]


def _listening(server: ServerConfig, port: int, *, shared: bool) -> socket.socket:
    address = f"{server.host}:{server.port}"
    try:
        found = socket.getaddrinfo(
            server.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise ConfigError("--host", f"{server.host!r} is no address: {error.strerror}") from error
    family, kind, protocol, _, resolved = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections inherit it: the kernel ends one whose client takes nothing for so long,
        # and the request with it. What waits for a client until then has a bound of its own.
        unread_ms = int(server.unread_timeout * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        listener.bind(resolved)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = f"cannot bind {address}: {error.strerror}"
        raise ConfigError("--port", f"{reason}; choose another port, or 0 for any") from error
    listener.setblocking(False)
    return listener


def check(server: ServerConfig) -> None:
    """Raise ConfigError naming the flag for keys or a certificate that cannot be used."""
    Keys.of(server)
    if server.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password, or a key that has one is asked for at the terminal.
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password="")
    except OSError as error:
        files = " and ".join(filter(None, (server.ssl_certfile, server.ssl_keyfile)))
        reason = "not a certificate and its key" if isinstance(error, ssl.SSLError) else error
        raise ConfigError("--ssl-certfile", f"cannot use {files}: {reason}") from None


def url_of(listener: socket.socket, server: ServerConfig) -> str:
    """Return the URL at which a bound socket is reached."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if server.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _is_local(listener: socket.socket) -> bool:
    host = listener.getsockname()[0]
    return bool(host.startswith("127.") or host == "::1")


class Covered:
    """Which other workers' sockets a server answers on, too, as it may change."""

    def __init__(self) -> None:
        self.workers: frozenset[int] = frozenset()
        self.changed = asyncio.Event()

    def become(self, workers: Iterable[int]) -> None:
        """Answer for these and for no others."""
        self.workers = frozenset(workers)
        self.changed.set()


async def serve(
    service: Service,
    listener: socket.socket,
    *,
    stop: asyncio.Event,
    drain_timeout_s: float,
    ready: Callable[[str], None] = lambda url: None,
    others: Mapping[int, socket.socket] | None = None,
    covered: Covered | None = None,
) -> None:
    """Serve `service` on `listener` until `stop` is set, then drain and close.

    On those of `others` as well that are `covered`, as long as they are.

    `ready` is called with the URL once connections are answered. A dead engine does
    not end this: requests get 503 until whoever owns the tree sets `stop`. Signals are
    the caller's.

    Thread: one event loop, the engine link's.
    """
    if not (service.server.api_key or service.server.api_key_file or _is_local(listener)):
        log.warning("there are no keys, so whoever reaches %s is served; see --api-key",
                    url_of(listener, service.server))  # fmt: skip
    server = _Server(create_app(service), listener, service.server)
    await server.start()
    ready(url_of(listener, service.server))
    covering = asyncio.create_task(server.cover(others or {}, covered or Covered()))
    try:
        await stop.wait()
        await _drain(service, drain_timeout_s)
    finally:
        covering.cancel()
        # What a drain left, or one that was cut short.
        service.live.break_off()
        # Those of a dead engine end by themselves, with the reason.
        await service.operations.ended(_LAST_WORDS_S / 2)
        service.operations.break_off()
        await server.stop()
        service.close()


async def _drain(service: Service, timeout_s: float) -> None:
    live, engine = service.live, service.engine
    live.draining = True
    if live:
        log.info("draining: %d requests have %g s to finish", len(live), timeout_s)
    ends = [asyncio.create_task(wait) for wait in (_all_done(service), engine.closed.wait())]
    try:
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
    if live:
        log.warning("%d requests did not finish in time and are broken off", len(live))
        live.break_off()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(live.idle.wait(), _LAST_WORDS_S)


async def _all_done(service: Service) -> None:
    """Wait until no request and no operation is in flight."""
    await service.desk.all_idle()
    await service.operations.ended()


class _Server:
    """uvicorn without its hold on the process: no signals, no log set-up, our own stop."""

    def __init__(self, app: ASGIApp, listener: socket.socket, server: ServerConfig) -> None:
        self._listener = listener
        self._config = uvicorn.Config(
            app,
            http="httptools",
            loop="uvloop",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody asks where a request comes from
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_LAST_WORDS_S,
            ssl_keyfile=server.ssl_keyfile,
            ssl_certfile=server.ssl_certfile,
        )
        self._server = uvicorn.Server(self._config)
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to answer connections."""
        self._config.load()
        self._server.lifespan = self._config.lifespan_class(self._config)
        await self._server.startup(sockets=[self._listener])
        self._ticking = asyncio.create_task(self._server.main_loop())

    async def cover(self, others: Mapping[int, socket.socket], covered: Covered) -> None:
        """Answer on other workers' sockets, while they are covered."""
        servers: dict[int, asyncio.Server] = {}
        while True:
            covered.changed.clear()
            for index in covered.workers & others.keys() - servers.keys():
                log.warning("answering for worker %d, which does not", index)
                servers[index] = await self._answering(others[index].dup())
                self._server.servers.append(servers[index])
            for index in servers.keys() - covered.workers:
                self._server.servers.remove(servers[index])
                servers.pop(index).close()
            await covered.changed.wait()

    async def _answering(self, listener: socket.socket) -> asyncio.Server:
        """Answer on one more socket, which is the server's own from now on."""

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = self._config.http_protocol_class(  # type: ignore[call-arg]
                config=self._config,
                server_state=self._server.server_state,
                app_state=self._server.lifespan.state,
            )
            return made

        return await asyncio.get_running_loop().create_server(
            protocol, sock=listener, ssl=self._config.ssl, backlog=_BACKLOG
        )

    async def stop(self) -> None:
        """Close the listener and, after a moment for last words, every connection."""
        self._server.should_exit = True
        if self._ticking is not None:
            await self._ticking
            await self._server.shutdown(sockets=[self._listener])
