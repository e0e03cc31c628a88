"""drumline itself, as `AsyncLLM` and as `drumline serve`."""

import json
import sys

from benchmarks.peers.driven import DRIVERS, Driven
from benchmarks.peers.engine import Engine, PeerFailed, Side
from benchmarks.peers.place import Place
from benchmarks.peers.served import Served, openai_dialect
from drumline.core.version import VERSION

_OPTIONS = {
    "embedded": {},
    "bf16": {"quantization": "none", "dtype": "bfloat16"},
}
NAME = "peers"


class Drumline:
    """The side that all others are compared with; also a peer of itself, for tests."""

    name = "drumline"

    def __init__(self, place: Place, **options: object) -> None:
        """Measure engines with these options of `AsyncLLM` (or flags of `serve`)."""
        self._place = place
        self._options = options

    def install(self) -> str:
        return VERSION

    def engine(self, side: Side) -> Engine:
        if side.model not in _OPTIONS:
            raise PeerFailed(f"drumline is not measured with {side.model} weights")
        options = {**_OPTIONS[side.model], **self._options}
        place = self._place
        log = place.logs / f"drumline-{side.model}{'-http' if side.http else ''}.log"
        if not side.http:
            driver = DRIVERS / "drumline_driver.py"
            return Driven([sys.executable, str(driver), json.dumps(options)], place.env, log)
        flags = [
            word
            for name, value in options.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]

        def command(port: int) -> list[str]:
            verb = [sys.executable, "-m", "drumline", "serve", "--served-model-name", NAME]
            return [*verb, "--port", str(port), "--log-level", "warning", *flags]

        return Served(command, "/readiness", openai_dialect(NAME), place.env, log)
