"""What stands in a GGUF file: its metadata and where its tensors lie.

It reads the head of the file only, so that whoever needs the tokenizer's arrays pays
for no weights and no tensor library. It does not know what the metadata means.

Layout (version 2 and 3, little-endian): magic, version, tensor count, entry
count; the entries (key, value type, value); per tensor its name, dimensions
(innermost first), storage type and offset; padding; the tensors' bytes.
"""

import mmap
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any

from msgspec import Struct

from drumline.core.errors import ConfigError

MAGIC = b"GGUF"

_DEFAULT_ALIGNMENT = 32
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_MAX_DIMENSIONS = 8


class TensorType(IntEnum):
    """How a tensor's values are stored; the types that can be read."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


BLOCKS: dict[TensorType, tuple[int, int]] = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.Q2_K: (256, 84),
    TensorType.Q3_K: (256, 110),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
}
"""Values a block of each type holds, and its bytes."""


class TensorEntry(Struct, frozen=True):
    """Where one tensor lies. `shape` is outermost first; `offset` counts from the file's start."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    bytes: int


class GgufFile(Struct, frozen=True):
    """The head of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def require(self, key: str) -> Any:
        """Return the metadata entry `key`. Raises ConfigError naming file and key."""
        value = self.metadata.get(key)
        if value is None:
            raise ConfigError(str(self.path), f"the GGUF metadata lacks {key}")
        return value


class _Cursor:
    """Reads values one behind the other; running out of bytes is struct.error."""

    __slots__ = ("_data", "offset")

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.offset = 0

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self._data, self.offset)
        self.offset += layout.size
        return values

    def raw_strings(self, count: int) -> list[bytes]:
        # A tokenizer holds a hundred thousand strings: no call in the loop but the unpacking.
        data, offset, end = self._data, self.offset, len(self._data)
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            (length,) = length_at(data, offset)
            offset += 8
            if length > end - offset:
                raise struct.error("string beyond the end")
            strings.append(data[offset : offset + length])
            offset += length
        self.offset = offset
        return strings

    def string(self) -> str:
        return self.raw_strings(1)[0].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalars("I")[0], self.scalars("Q")[0]
            if count > len(self._data):
                raise struct.error("array beyond the end")
            if item == _STRING:
                return [text.decode(errors="replace") for text in self.raw_strings(count)]
            if item == _ARRAY:
                return [self.value(_ARRAY) for _ in range(count)]
            return list(self.scalars(_SCALARS[item], count))
        return self.scalars(_SCALARS[kind])[0]


def read_gguf(path: Path) -> GgufFile:
    """Read the head of the GGUF file at `path`.

    Raises ConfigError naming the file when it is none, is cut short, or stores
    tensors in a type that cannot be read.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ConfigError(str(path), "is no GGUF file: it does not begin with 'GGUF'")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read_head(path, data)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except struct.error as error:
        size = path.stat().st_size
        raise ConfigError(
            str(path), f"is truncated or damaged: its head does not end within its {size} bytes"
        ) from error
    except (KeyError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            str(path), f"is damaged: unreadable entry in its head ({error})"
        ) from error


def _read_head(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(data)
    cursor.scalars("B", len(MAGIC))
    version = cursor.scalars("I")[0]
    if version not in _VERSIONS:
        known = " and ".join(map(str, _VERSIONS))
        raise ConfigError(str(path), f"has GGUF version {version}; {known} can be read")
    tensor_count, entry_count = cursor.scalars("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalars("I")[0])
    found = [_read_tensor(path, cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ConfigError(
            str(path), f"has general.alignment {alignment!r}; expected a positive int"
        )
    start = -(-cursor.offset // alignment) * alignment
    entries = [_place(path, name, kind, shape, start + at) for name, kind, shape, at in found]
    end = start
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset < end:
            raise ConfigError(
                str(path),
                f"is damaged: tensor {entry.name} begins at byte {entry.offset}, where "
                f"another one, which ends at byte {end}, still lies",
            )
        end = entry.offset + entry.bytes
        if end > len(data):
            raise ConfigError(
                str(path),
                f"is truncated: tensor {entry.name} ends at byte {end}, the file has {len(data)}",
            )
    return GgufFile(path, metadata, {entry.name: entry for entry in entries})


def _read_tensor(path: Path, cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.string()
    dimensions = cursor.scalars("I")[0]
    if dimensions > _MAX_DIMENSIONS:
        raise ConfigError(str(path), f"is damaged: tensor {name!r} has {dimensions} dimensions")
    shape = cursor.scalars("Q", dimensions)[::-1]
    kind, offset = cursor.scalars("I")[0], cursor.scalars("Q")[0]
    return name, kind, shape, offset


def _place(path: Path, name: str, kind: int, shape: tuple[int, ...], offset: int) -> TensorEntry:
    try:
        stored = TensorType(kind)
    except ValueError:
        known = ", ".join(known.name for known in TensorType)
        raise ConfigError(
            str(path), f"tensor {name} is stored as GGML type {kind}; can be read: {known}"
        ) from None
    values, size = BLOCKS[stored]
    count = 1
    for extent in shape:
        count *= extent
    if not shape or shape[-1] % values:
        raise ConfigError(
            str(path), f"is damaged: tensor {name} of {stored.name} has rows that no block fills"
        )
    return TensorEntry(name, stored, shape, offset, count // values * size)
