"""The types of fields, and how sizes and addresses are written."""

from typing import Annotated

from msgspec import Meta

from drumline.core.errors import ConfigError

Port = Annotated[int, Meta(ge=0, le=65535)]
# Counts fit the arrays they are computed with, and seconds a message: JSON has no infinity.
Positive = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
NotNegative = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Rows = Annotated[int, Meta(ge=1, le=65536)]
ContextTokens = Annotated[int, Meta(ge=2, le=(1 << 31) - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
ModelName = Annotated[str, Meta(min_length=1)]
Key = Annotated[str, Meta(min_length=1)]
Gigabytes = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]


def flags(*names: str) -> dict[str, list[str]]:
    """Return a field's `extra` that gives its flag these other spellings."""
    return {"flags": list(names)}


_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(setting: str, text: str, unit: str = "") -> int:
    """Return the bytes that `text` (`2GiB`, `512 MiB`, `1000000`) names.

    A bare number counts `unit`s. Raises ConfigError naming `setting` when it names none.
    """
    stripped = text.strip()
    digits = stripped.rstrip("KMGiBkmgb ")
    unit = stripped[len(digits) :].strip().lower() or unit
    try:
        size = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(setting, f"{text!r} is no size; write it as 2GiB or 512MiB") from None
    if size <= 0:
        raise ConfigError(setting, f"{text!r} is no size above zero")
    return size


def tcp(host: str, port: int | str) -> str:
    """Return a host and port as one address: `tcp://127.0.0.1:30500`, `tcp://[::1]:30500`."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
