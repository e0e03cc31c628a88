"""The kernels as Python calls them: their C interface, and the best of them that runs here.

A library is taken only after a trial of it came to what it should; else the next one is tried.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from msgspec import Struct

from drumline.core.errors import InvariantError
from drumline.device.kernels.compiling import (
    VARIANTS,
    NotCompiledError,
    Variant,
    compiled,
    default_folder,
)
from drumline.device.kernels.processor import instruction_sets

_log = logging.getLogger(__name__)

NIBBLES, BYTES, OFFSET_BYTES, FLOATS, BFLOATS, HALVES = range(6)
"""Kinds of weights: packed ones of 4 bits above a minimum, of 8, and of 8 above a minimum;
float32, bfloat16 and float16, as they lie."""
FLOAT32, BFLOAT16, INT8 = 0, 1, 2
"""Kinds of pools of keys and values."""
MOST_SHARED_HEADS = 64
MOST_HEAD_DIM = 1024
"""Of which sums of integers are exact."""
_NO_ROW = 2
"""What a function says that was given an id of no row."""


class Matrix(Structure):
    """A matrix; see matrix.h."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("kind", c_int32),
        ("paired", c_int32),
    )


class Heads(Structure):
    """Numbers of heads, and how the pool holds them; see attention.h."""

    _fields_ = (
        ("queries", c_int64),
        ("keys", c_int64),
        ("size", c_int64),
        ("block_rows", c_int64),
        ("pool", c_int32),
        ("reserved", c_int32),
    )


class Cache(Structure):
    """One layer's part of the pool; see attention.h."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("window", c_int64))


class Batch(Structure):
    """Where a forward's tokens lie; see attention.h."""

    _fields_ = (
        ("tokens", c_int64),
        ("rows", c_int64),
        ("columns", c_int64),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("blocks", c_void_p),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("prefixes", c_void_p),
    )


class Ways(Structure):
    """How pool rows draw; see sampling.h."""

    _fields_ = (
        ("greedy", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("typical_p", c_void_p),
        ("seeds", c_void_p),
    )


class Rows(Structure):
    """Rows of logits to draw from; see sampling.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("count", c_int64),
        ("vocab", c_int64),
        ("places", c_void_p),
        ("rows", c_void_p),
        ("positions", c_void_p),
        ("names", c_void_p),
    )


class Layer(Structure):
    """One layer's weights; see decoder.h."""

    _fields_ = (
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("cache", Cache),
    )


class Model(Structure):
    """A decoder; see decoder.h."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("embedding", Matrix),
        ("head", Matrix),
        ("norm", c_void_p),
        ("frequencies", c_void_p),
        ("heads", Heads),
        ("count", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("eps", c_float),
        ("reserved", c_int32),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "machine": (c_void_p, (c_int32,)),
    "machine_free": (None, (c_void_p,)),
    "packed_bytes": (c_int64, (POINTER(Matrix),)),
    "pack": (
        None,
        (c_void_p, POINTER(Matrix), c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int32),
    ),
    "rows": (c_int32, (POINTER(Matrix), c_void_p, c_int64, c_void_p)),
    "linear": (c_int32, (c_void_p, POINTER(Matrix), c_void_p, c_int64, c_void_p)),
    "attention": (
        c_int32,
        (
            c_void_p,
            POINTER(Heads),
            POINTER(Cache),
            POINTER(Batch),
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
        ),
    ),
    "layers": (
        c_int32,
        (c_void_p, POINTER(Model), POINTER(Batch), c_void_p, c_int64, c_int64),
    ),
    "head": (c_int32, (c_void_p, POINTER(Model), c_void_p, c_int64, c_void_p)),
    "draw": (c_int32, (c_void_p, POINTER(Rows), POINTER(Ways), c_void_p, c_void_p)),
    "tell": (
        c_int32,
        (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64)
        + (c_void_p,) * 6,
    ),
    "penalize": (c_int32, (c_void_p, c_void_p, c_int64, c_int64) + (c_void_p,) * 7),
}


class Kernels:
    """A loaded library. Its functions release Python's lock while they run."""

    def __init__(self, name: str, path: Path) -> None:
        """Load the library at `path`. Raises OSError where it cannot be."""
        self.name = name
        library = ctypes.CDLL(str(path))
        self._functions = {}
        for function, (result, arguments) in _FUNCTIONS.items():
            found = getattr(library, f"drumline_{function}")
            found.restype, found.argtypes = result, arguments
            self._functions[function] = found

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the library."""
        return self._functions[function](*arguments)

    def run(self, function: str, *arguments: Any) -> None:
        """Call a function that says how it went.

        Raises InvariantError, or IndexError where an id is none of a vocabulary's.
        """
        status = self.call(function, *arguments)
        if status == _NO_ROW:
            raise IndexError("a token id is outside the vocabulary")
        if status:
            raise InvariantError(f"no memory for the kernel {function}")


class Machine:
    """Some threads of the kernels, and the memory they work in.

    Thread: one at a time.
    """

    __slots__ = ("_address", "kernels", "threads")

    def __init__(self, kernels: Kernels, threads: int) -> None:
        """Start the threads. Raises InvariantError where the system has none."""
        self.kernels = kernels
        self.threads = threads
        self._address = kernels.call("machine", threads)
        if not self._address:
            raise InvariantError(f"the system has no {threads} threads for kernels")

    def run(self, function: str, *arguments: Any) -> None:
        """Call a function that works with the threads. Raises as `Kernels.run` does."""
        self.kernels.run(function, self._address, *arguments)

    def __del__(self) -> None:
        if getattr(self, "_address", None):
            self.kernels.call("machine_free", self._address)


Trial = Callable[[Kernels], str | None]
"""Returns what a library gets wrong, if anything."""


class Found(Struct, frozen=True, eq=False):
    """The kernels that run here, or why none does."""

    kernels: Kernels | None
    why_none: str = ""


def find_kernels(
    trial: Trial,
    folder: Path | None = None,
    variants: Sequence[Variant] = VARIANTS,
    has: frozenset[str] | None = None,
) -> Found:
    """Return the best kernels that this machine can compile, load and trust."""
    sets = instruction_sets() if has is None else has
    fitting = [variant for variant in variants if variant.needs <= sets]
    if not fitting:
        return Found(None, "the processor lacks AVX2, FMA or F16C")
    why = ""
    for variant in fitting:
        try:
            kernels = Kernels(variant.name, compiled(variant, folder or default_folder()))
            wrong = trial(kernels)
        except NotCompiledError as error:
            wrong = str(error)
        except OSError as error:
            wrong = f"the library cannot be loaded: {error}"
        if wrong is None:
            return Found(kernels)
        _log.warning("no %s kernels: %s", variant.name, wrong)
        why = why or wrong
    return Found(None, why)
