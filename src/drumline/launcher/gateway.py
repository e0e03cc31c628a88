"""A gateway of somebody else's as a child process: its flags, its readiness, its end.

The gateway is the HTTP server: it binds the operator's host and port, and the sockets that the
ranks dial. It knows nothing of the ranks, and they only where it is.
"""

import asyncio
import contextlib
import importlib.util
import logging
import math
import os
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from drumline.core.config import (
    Config,
    LoadBalance,
    ReasoningParser,
    ServerConfig,
    ToolCallParser,
    tcp,
)
from drumline.core.errors import ConfigError, PeerError
from drumline.core.model_files import ModelFiles, ModelFormat
from drumline.frontend.text.load import load_tokenizer
from drumline.launcher.nodes import free_port, frontend_host

_log = logging.getLogger(__name__)

_PACKAGE = "smg"
_DISTRIBUTION = "tokenspeed-smg"
_KEY_VARIABLE = "SMG_API_KEY"
_POLL_S = 0.2
_ANSWER_S = 5.0
_LAST_WORDS_S = 5.0
_LOOPBACK = "127.0.0.1"
_UNSAID = ServerConfig()

_OURS_ALONE = (
    "unread_timeout",
    "admin_api_key",
    "api_server_count",
)
"""What this gateway has no flag for."""


def check_gateway(config: Config) -> None:
    """Raise ConfigError where the gateway is not installed, or would not do what was asked."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ConfigError("--gateway", f"smg is not installed: pip install {_DISTRIBUTION}")
    server = config.server
    for name in _OURS_ALONE:
        if getattr(server, name) != getattr(_UNSAID, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(flag, "has no effect with --gateway smg, which has no such setting")
    if len(server.api_key) > 1 or (server.api_key and server.api_key_file):
        raise ConfigError("--api-key", "--gateway smg takes one key, or a file that holds one")
    if config.parallel.load_balance_method is not LoadBalance.SHORTEST_QUEUE:
        raise ConfigError("--load-balance-method", "has no effect with --gateway smg")
    if config.chat.tool_call_parser is not ToolCallParser.AUTO:
        raise ConfigError("--tool-call-parser", "has no effect with --gateway smg")
    if config.chat.reasoning_parser is not ReasoningParser.AUTO:
        raise ConfigError("--reasoning-parser", "has no effect with --gateway smg")
    template = config.chat.chat_template
    if template is not None and not Path(template).is_file():
        raise ConfigError("--chat-template", "--gateway smg takes a file")


class Gateway:
    """One `smg` process in front of the ranks of one engine. Thread: one event loop's."""

    def __init__(self, config: Config, files: ModelFiles, port: int) -> None:
        """Choose where the ranks will find it; start nothing. `port` is free on its host."""
        self._config = config
        self._files = files
        self._port = port
        host = frontend_host(config.parallel)
        self.handshake = tcp(host, free_port(host))
        """What the ranks dial."""
        self._place = tempfile.TemporaryDirectory(prefix="drumline-gateway-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients reach it."""
        server = self._config.server
        host = f"[{server.host}]" if ":" in server.host else server.host
        return f"{'http' if server.ssl_certfile is None else 'https'}://{host}:{self._port}"

    def start(self) -> None:
        """Start the process, without waiting for it."""
        name = _model_for(self._config, self._files, Path(self._place.name))
        words = [sys.executable, "-m", _PACKAGE, "launch", *self._flags(name)]
        environment = dict(os.environ)
        if self._config.server.api_key:
            # Not on the command line, which whoever is on the machine can read.
            environment[_KEY_VARIABLE] = self._config.server.api_key[0]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "drumline.launcher.tethered", str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            cwd=self._place.name,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C is the launcher's to answer
        )

    def _flags(self, name: str) -> Sequence[str]:
        """Return the gateway's command line: nothing is bound beyond what the operator named."""
        server, process = self._config.server, self._config.process
        flags = [
            *("--host", server.host, "--port", str(self._port)),
            *("--prometheus-host", _LOOPBACK, "--prometheus-port", str(free_port(_LOOPBACK))),
            *("--worker-urls", self.handshake, "--backend", "tokenspeed"),
            *("--zmq-engine-count", str(self._config.parallel.data_parallel_size)),
            *("--zmq-startup-timeout-secs", str(math.ceil(process.startup_timeout))),
            *("--model-path", name, "--policy", "passthrough"),
            # An abort is an answer; asked again, it would run again. And one engine that fails
            # must not be left out of service: there is no other.
            *("--disable-retries", "--disable-circuit-breaker", "--disable-load-monitoring"),
            *("--log-level", "warn", "--shutdown-settle-secs", "0"),
            *("--shutdown-grace-period-secs", str(max(1, math.ceil(process.drain_timeout)))),
            *("--max-payload-size", str(server.max_body_bytes)),
        ]
        for alias in self._config.model.served_model_name[1:]:
            flags += ["--model-alias", f"{alias}={name}"]
        for flag, value in (
            ("--chat-template", self._config.chat.chat_template),
            ("--api-key-file", server.api_key_file),
            ("--tls-cert-path", server.ssl_certfile),
            ("--tls-key-path", server.ssl_keyfile),
        ):
            if value is not None:
                flags += [flag, str(Path(value).absolute())]
        if server.max_concurrent_streams is not None:
            flags += ["--max-concurrent-requests", str(server.max_concurrent_streams)]
        if server.request_timeout is not None:
            flags += ["--request-timeout-secs", str(math.ceil(server.request_timeout))]
        if server.allowed_origins:
            flags += ["--cors-allowed-origins", *server.allowed_origins]
        return flags

    async def ready(self, timeout_s: float) -> None:
        """Wait until it answers for the engine. Raises PeerError when it ends or takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self._status("/readiness") != 200:  # noqa: PLR2004
                    self._check_runs()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise PeerError(
                f"the gateway at {self.url} is not ready after {timeout_s:g} s; "
                "raise --startup-timeout if it only needs longer"
            ) from None

    def _check_runs(self) -> None:
        status = None if self._process is None else self._process.poll()
        if status is not None:
            raise PeerError(f"the gateway ended with status {status}; its log is above")

    async def _status(self, path: str) -> int:
        """Return the HTTP status of a route; 0 while nobody answers."""
        context = None
        if self._config.server.ssl_certfile is not None:
            # Whether our own child answers, and not who it says it is.
            context = ssl._create_unverified_context()
        host = self._config.server.host
        with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection(host, self._port, ssl=context)
                try:
                    writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
                    return int((await reader.readline()).split()[1])
                finally:
                    writer.close()
        return 0

    async def lost(self) -> PeerError:
        """Wait until it ends by itself; return the error that says so."""
        while True:
            try:
                self._check_runs()
            except PeerError as error:
                return error
            await asyncio.sleep(_POLL_S)

    async def stop(self, grace_s: float) -> None:
        """Let requests finish for `grace_s`, then end it. Does nothing once it has ended."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            for _ in range(math.ceil((grace_s + _LAST_WORDS_S) / _POLL_S)):
                if process.poll() is not None:
                    break
                await asyncio.sleep(_POLL_S)
            self.kill()
        self._place.cleanup()

    def kill(self) -> None:
        """End it and what it started at once."""
        process = self._process
        if process is not None and process.poll() is None:
            _log.warning("killing the gateway (pid %d)", process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(_LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                _log.error("the gateway (pid %d) is killed and does not end", process.pid)


def _model_for(config: Config, files: ModelFiles, place: Path) -> str:
    """Return the path, seen from `place`, under which the gateway finds what it reads of a model.

    It serves a model under the path that it was given, so the path is the served name. Of a GGUF
    file, which it does not read, it gets tokenizer and chat template in a directory's form.
    """
    name = config.model.served_model_name[0]
    if files.format is ModelFormat.DIRECTORY and Path(name).is_absolute():
        return name
    directory = place / (Path(name).name if Path(name).is_absolute() else name)
    if place.resolve() not in directory.resolve().parents:
        raise ConfigError("--served-model-name", f"{name!r} is no name that --gateway can serve")
    directory.parent.mkdir(parents=True, exist_ok=True)
    if files.format is ModelFormat.DIRECTORY:
        directory.symlink_to(files.path.absolute())
    else:
        directory.mkdir()
        load_tokenizer(files).write(directory)
        (directory / "config.json").write_text('{"model_type": "llama"}')
    return str(directory.relative_to(place))
