"""Who may call which route: every route has a class, and keys open classes.

It compares keys and knows no route by name. A key that a class does not need is no
reason to refuse: clients send theirs everywhere.
"""

import hashlib
import hmac
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Self

from starlette.types import ASGIApp, Receive, Scope, Send

from drumline.core.config import ServerConfig
from drumline.core.errors import ConfigError, RequestError
from drumline.core.ids import request_id
from drumline.frontend.web.incoming import header
from drumline.frontend.web.reply import Reply

_SCHEME = "bearer "
_NOT_ENOUGH = "insufficient_permissions"


class Access(StrEnum):
    """What a route does, and so who may call it."""

    OPEN = "open"
    """It says whether the server lives and how it fares: for probes, which have no keys."""
    CLIENT = "client"
    """It serves the model: for whoever has a key, where there are keys."""
    CONTROL = "control"
    """It changes what all clients meet: for the operator's key, where there is one."""


class Keys:
    """The keys of clients and of the operator, as digests."""

    def __init__(self, clients: Iterable[str] = (), operators: Iterable[str] = ()) -> None:
        client, operator = _digests(clients), _digests(operators)
        self._opens: dict[Access, tuple[bytes, ...]] = {
            Access.OPEN: (),
            # The operator's opens all; without one, clients' keys guard what they can.
            Access.CLIENT: (*client, *operator) if client else (),
            Access.CONTROL: operator or client,
        }
        self._known = (*client, *operator)

    @classmethod
    def of(cls, server: ServerConfig) -> Self:
        """Return the keys of a configuration, those of its file included.

        Raises ConfigError for a file that cannot be read or has no key, and for a key that no
        header can carry.
        """
        listed = list(server.api_key)
        if server.api_key_file is not None:
            listed += _keys_in(server.api_key_file)
        operators = [] if server.admin_api_key is None else [server.admin_api_key]
        for flag, keys in (("--api-key", listed), ("--admin-api-key", operators)):
            if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
                raise ConfigError(flag, "a key is of printable ASCII characters without spaces")
        return cls(listed, operators)

    def guarded(self, access: Access, app: ASGIApp) -> ASGIApp:
        """Return `app`, behind the keys that open its class, if there are any."""
        opening = self._opens[access]
        return _Guard(self, opening, app) if opening else app

    def check(self, scope: Scope, opening: tuple[bytes, ...]) -> None:
        """Raise RequestError 401 without a known key, 403 for one that does not open this."""
        given = _given(scope)
        if given is None:
            raise RequestError(
                401, "a key is needed, as `Authorization: Bearer KEY`", code="missing_api_key"
            )
        digest = _digest(given)
        if _among(digest, opening):
            return
        if _among(digest, self._known):
            raise RequestError(
                403, f"this key does not open {scope['path']}; the operator's does",
                code=_NOT_ENOUGH,
            )  # fmt: skip
        raise RequestError(401, "the key is not one of this server's", code="invalid_api_key")


class _Guard:
    """An application behind keys."""

    def __init__(self, keys: Keys, opening: tuple[bytes, ...], app: ASGIApp) -> None:
        self._keys = keys
        self._opening = opening
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._keys.check(scope, self._opening)
        except RequestError as error:
            asks = () if error.code == _NOT_ENOUGH else ((b"www-authenticate", b"Bearer"),)
            await Reply.to(scope, send, request_id("req")).error(error, asks)
            return
        await self._app(scope, receive, send)


def _given(scope: Scope) -> str | None:
    """Return the key of a request: OpenAI's header, or Anthropic's."""
    bearer = header(scope, b"authorization")
    if bearer is not None and bearer[: len(_SCHEME)].lower() == _SCHEME:
        return bearer[len(_SCHEME) :].strip()
    return header(scope, b"x-api-key")


def _keys_in(path: str) -> list[str]:
    """Return the keys of a file, one a line; empty lines and those that begin with # are none."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError("--api-key-file", f"cannot read {path}: {reason}") from None
    stripped = [line.strip() for line in lines]
    keys = [line for line in stripped if line and not line.startswith("#")]
    if not keys:
        raise ConfigError("--api-key-file", f"{path} has no key; write one a line")
    return keys


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(map(_digest, keys))


def _digest(key: str) -> bytes:
    # Of one length, so that comparing them tells nothing of the keys' own.
    return hashlib.sha256(key.encode()).digest()


def _among(digest: bytes, known: tuple[bytes, ...]) -> bool:
    # All of them, whichever it is: the time it takes says nothing.
    return sum([hmac.compare_digest(digest, each) for each in known]) > 0
