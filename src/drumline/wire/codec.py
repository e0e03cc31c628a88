"""Encoding and decoding of wire messages, and the one error that bad bytes raise.

Every struct of this room is encoded in full, defaults and nil included, and decoded
leniently: a shorter array takes defaults, a longer one and unknown keys are ignored.
Pickles have no way in: the extension codes reserved for them are refused.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.msgpack import Decoder, Encoder

from drumline.core.errors import PeerError

Buffer = bytes | bytearray | memoryview

encode: Callable[[Any], bytes] = Encoder().encode
"""Encode a struct of this room. Thread: any."""


class MalformedFrameError(PeerError):
    """Bytes from a peer that are no message of this wire."""


def _no_extensions(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension type {code} is not allowed here")


def decoder(kind: Any) -> Callable[[Buffer], Any]:
    """Return a function that decodes one message of type `kind`.

    The function raises MalformedFrameError on any bytes that are no such message, and
    nothing else. Thread: any.
    """
    decode = Decoder(kind, ext_hook=_no_extensions).decode

    def checked(data: Buffer) -> Any:
        try:
            return decode(data)
        # ValueError covers msgspec's own errors; nesting deeper than the stack is a RecursionError.
        except (ValueError, RecursionError, OverflowError) as error:
            raise MalformedFrameError(str(error)) from None

    return checked


MOST_NESTED = 64
"""Levels that a value of free shape may have. Whoever takes it over may encode, show or decode
it from a deeper stack than the one it was decoded on."""


def check_nesting(what: str, value: Any) -> None:
    """Raise MalformedFrameError if `value`, plain lists and maps, nests too deeply."""
    level = [value]
    for _ in range(MOST_NESTED + 1):
        level = [
            inner
            for each in level
            if isinstance(each, list | tuple | dict)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise MalformedFrameError(f"{what} nests deeper than {MOST_NESTED} levels")


decode_any: Callable[[Buffer], Any] = decoder(Any)
"""Decode a message of unknown shape into plain lists, maps and scalars."""


def converted(value: Any, kind: Any) -> Any:
    """Return a decoded message as type `kind`. Raises MalformedFrameError."""
    try:
        return msgspec.convert(value, kind)
    except (ValueError, RecursionError, OverflowError) as error:
        raise MalformedFrameError(str(error)) from None


def readable_rid(payload: Buffer) -> str | None:
    """Return element 1 of an encoded array if it is a string, however broken the rest is.

    A request that cannot be decoded can still be answered if its id can be read.
    """
    data = bytes(payload[:4096])
    try:
        at = _array_body(data)
        _, at = _string(data, at)
        rid, _ = _string(data, at)
    except (IndexError, ValueError):
        return None
    return rid or None


def _array_body(data: bytes) -> int:
    """Return where the elements of an array of at least two begin."""
    head = data[0]
    if 0x92 <= head <= 0x9F:
        return 1
    if head == 0xDC:
        return 3
    if head == 0xDD:
        return 5
    raise ValueError("no array")


def _string(data: bytes, at: int) -> tuple[str, int]:
    """Return the string at `at`, and where the next element begins."""
    head = data[at]
    if 0xA0 <= head <= 0xBF:
        start, length = at + 1, head & 0x1F
    elif 0xD9 <= head <= 0xDB:
        width = 1 << (head - 0xD9)
        start = at + 1 + width
        length = int.from_bytes(data[at + 1 : start], "big")
    else:
        raise ValueError("no string")
    end = start + length
    if end > len(data):
        raise ValueError("cut short")
    return data[start:end].decode(), end
