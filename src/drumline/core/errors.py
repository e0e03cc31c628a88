"""The errors drumline raises, sorted by whose fault they are.

* DrumlineError
  - ConfigError     the operator's: refuse to start, name the setting
  - RequestError    one client's: answer it with a status, serve on
  - PeerError       another process's: its work fails or is retried, serve on
  - InvariantError  ours: the rank stops loudly

None derives from ValueError or TypeError: msgspec folds those two into its own
ValidationError when they are raised while a struct is being built.
"""

import reprlib

_MOST_CHARACTERS = 200


def quoted(value: object) -> str:
    """Return `value` as a complaint quotes it: its repr, with what is long left out."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _MOST_CHARACTERS
    short.maxlevel = 2
    return excerpt(short.repr(value))


def excerpt(text: str) -> str:
    """Return `text` as a complaint repeats it, without the middle of what is long."""
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]}...{text[-half:]}"


class DrumlineError(Exception):
    """Anything drumline raises on purpose."""


class ConfigError(DrumlineError):
    """What the operator asked for cannot be done; `setting` names the flag or file."""

    def __init__(self, setting: str, reason: str) -> None:
        super().__init__(f"{setting}: {reason}")
        self.setting = setting
        self.reason = reason


class RequestError(DrumlineError):
    """One client's request cannot be served; `status` is the HTTP status it gets."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


class PeerError(DrumlineError):
    """Another process broke its side of an exchange, or went away."""


class InvariantError(DrumlineError):
    """drumline broke a promise of its own; serving cannot go on."""
