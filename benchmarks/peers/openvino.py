"""OpenVINO GenAI, which reads GGUF files by itself; 300 MB of wheels."""

from benchmarks.peers.driven import DRIVERS, Driven
from benchmarks.peers.engine import Engine, PeerFailed, Side
from benchmarks.peers.models import gguf_file
from benchmarks.peers.place import Place, install

PACKAGES = ["openvino-genai==2026.4.1.0", "openvino==2026.4.1", "numpy==2.4.6"]
# Its reader of GGUF knows no bfloat16; what it computes in is bfloat16 all the same, where the
# processor has it.
_FORMS = {"embedded": "embedded", "q4_0": "q4_0", "bf16": "f16"}


class OpenVino:
    """In process only: it brings no server."""

    name = "openvino"

    def __init__(self, place: Place) -> None:
        self._place = place

    def install(self) -> str:
        return install(self._place, self.name, PACKAGES, limit_s=900)

    def engine(self, side: Side) -> Engine:
        if side.http:
            raise PeerFailed("OpenVINO GenAI brings no server")
        place = self._place
        model = gguf_file(place, _FORMS[side.model])
        return Driven(
            [
                str(place.python(self.name)),
                str(DRIVERS / "openvino_driver.py"),
                str(model),
                str(place.threads),
            ],
            place.env,
            place.logs / f"openvino-{side.model}.log",
        )
