"""Compiling the kernels, once for each version of them, compiler and variant.

A library is kept under a name that says what it was made from, so that it can be found and
never be mistaken for another. It does not know what is in it.
"""

import hashlib
import logging
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from drumline.core.clock import SystemClock
from drumline.core.leash import TooLongError, run_leashed

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
_MAIN = "native.cpp"
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-w")
_LONGEST_S = 300
_WORK = "compiling-"


class Variant(Struct, frozen=True):
    """The kernels for processors that have these instruction sets."""

    name: str
    needs: frozenset[str]
    """By the names Linux has for them."""
    flags: tuple[str, ...]


_NEEDS = frozenset({"avx2", "fma", "f16c"})
_FLAGS_OF_ALL = ("-mavx2", "-mfma", "-mf16c")
_VNNI_NEEDS = _NEEDS | {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}
_VNNI_FLAGS = (*_FLAGS_OF_ALL, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni")
VARIANTS = (
    Variant("avx512-bf16", _VNNI_NEEDS | {"avx512_bf16"}, (*_VNNI_FLAGS, "-mavx512bf16")),
    Variant("avx512-vnni", _VNNI_NEEDS, _VNNI_FLAGS),
    Variant("avx2", _NEEDS, _FLAGS_OF_ALL),
)
"""Those that are quicker first."""


class NotCompiledError(Exception):
    """There is no library; the message says why, and what helps."""


def default_folder() -> Path:
    """Return where libraries are kept: in the virtual environment, else in the user's cache.

    Raises NotCompiledError where there is neither.
    """
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        return Path(sys.prefix) / "share" / "drumline"
    try:
        return Path.home() / ".cache" / "drumline"
    except RuntimeError:
        raise NotCompiledError("there is no home directory to keep libraries in") from None


def compiled(variant: Variant, folder: Path) -> Path:
    """Return the library of a variant in `folder`, which is compiled unless it is there.

    Raises NotCompiledError. Processes that compile at the same time do not harm each other.
    """
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NotCompiledError(
            f"there is no C++ compiler ({', '.join(_COMPILERS)}); install g++ 11 or newer"
        )
    target = folder / f"native-{variant.name}-{_digest(variant, compiler)}.so"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_WORK) as work:
            made = Path(work) / target.name
            _compile(compiler, variant, made)
            os.replace(made, target)
    except OSError as error:
        raise NotCompiledError(f"{folder} cannot be written: {error.strerror}") from error
    return target


def _sweep(folder: Path) -> None:
    """Remove what compiles left behind whose process was killed."""
    over = SystemClock().wall_s() - 2 * _LONGEST_S
    for left in folder.glob(f"{_WORK}*"):
        with suppress(OSError):  # another process may be quicker
            if left.stat().st_mtime < over:
                shutil.rmtree(left)


def _digest(variant: Variant, compiler: str) -> str:
    digest = hashlib.sha256(repr((variant.flags, _FLAGS, os.path.realpath(compiler))).encode())
    for path in sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _compile(compiler: str, variant: Variant, target: Path) -> None:
    command = [compiler, *_FLAGS, *variant.flags, str(SOURCES / _MAIN), "-o", str(target)]
    _log.warning(
        "compiling the %s kernels with %s, which is done once and may take a minute "
        "of the time to start",
        variant.name,
        compiler,
    )
    try:
        # A compiler starts others, and a rank may be killed meanwhile.
        status, told = run_leashed(command, _LONGEST_S)
    except TooLongError:
        raise NotCompiledError(f"{compiler} did not end within {_LONGEST_S} s") from None
    if status:
        lines = told.strip().splitlines()
        said = next((line for line in lines if "error" in line), lines[0] if lines else "")
        raise NotCompiledError(f"{compiler} failed: {said}; g++ 11 or newer is needed")
