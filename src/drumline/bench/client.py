"""A client of servers that stream, over a connection for each request.

It does as little as it can for an event, because what it costs is taken from the server's
cores where both share a machine. It does not know what is asked, nor what events mean.
"""

import asyncio
import contextlib
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Callable

import httptools
from msgspec import Struct

from drumline.core.errors import ConfigError, PeerError

_READ_BYTES = 1 << 16
_OK = 200
_SHOWN = 300
"""Characters of what a server says instead of an answer."""


class Target(Struct, frozen=True):
    """Where a server is, and what every request to it carries."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    """The path before those of the API."""
    api_key: str | None = None


def target_of(base_url: str, api_key: str | None = None) -> Target:
    """Read a URL, which may end in `/v1`. Raises ConfigError."""
    try:
        url = urllib.parse.urlsplit(base_url)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ConfigError("--base-url", f"{base_url!r} is no URL: {error}") from None
    if url.scheme not in ("http", "https") or not host:
        raise ConfigError("--base-url", f"{base_url!r} is no URL; write http://127.0.0.1:8000")
    tls = url.scheme == "https"
    prefix = url.path.rstrip("/").removesuffix("/v1")
    return Target(host, port or (443 if tls else 80), tls, prefix, api_key)


class Connection:
    """An open connection, good for one request."""

    def __init__(
        self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._target = target
        self._reader = reader
        self._writer = writer
        self._whole = False
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    async def get(self, path: str) -> bytes:
        """Return the body of a reply. Raises PeerError where it is none of status 200."""
        self._send("GET", path, b"")
        return b"".join([piece async for piece in self._pieces()])

    async def post(self, path: str, body: bytes, heard: Callable[[bytes], None]) -> None:
        """Post JSON and hand the JSON of each event of the reply to `heard` as it comes.

        Raises PeerError for a reply of another status than 200, and for one that breaks off.
        """
        self._send("POST", path, body)
        held = b""
        done = False
        try:
            async for piece in self._pieces():
                *lines, held = (held + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        data = line[5:].strip()
                        done = data == b"[DONE]"
                        if not done:
                            heard(data)
        except PeerError:
            if not done:
                raise

    def on_body(self, data: bytes) -> None:
        """Keep a piece of the reply's body, for the parser."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Note the reply's end, for the parser."""
        self._whole = True

    def _send(self, method: str, path: str, body: bytes) -> None:
        target = self._target
        key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        head = (
            f"{method} {target.prefix}{path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\n"
            f"Connection: close\r\nContent-Type: application/json\r\n{key}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Yield what of the reply's body came together. Raises PeerError."""
        refusal: list[bytes] = []
        while not self._whole:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise PeerError("the answer broke off")
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                raise PeerError(f"no HTTP was answered: {error}") from None
            body, self._body = b"".join(self._body), []
            if self._parser.get_status_code() == _OK:
                yield body
            else:
                refusal.append(body)
        status = self._parser.get_status_code()
        if status != _OK:
            said = b"".join(refusal).decode(errors="replace")[:_SHOWN]
            raise PeerError(f"answered {status}: {said}")


@contextlib.asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Connection]:
    """Open a connection for the time of the block. Raises OSError where nobody answers."""
    tls = ssl.create_default_context() if target.tls else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=tls)
    try:
        yield Connection(target, reader, writer)
    finally:
        writer.close()
