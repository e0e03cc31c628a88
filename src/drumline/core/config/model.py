"""Which model is served, and how it is computed."""

import re
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from drumline.core.config.fields import ContextTokens, ModelName, flags
from drumline.core.errors import ConfigError

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")


class Dtype(StrEnum):
    """What weights and activations are computed in."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @classmethod
    def _missing_(cls, value: object) -> "Dtype | None":
        """Take the names that torch and other engines have for these, too."""
        return {
            "half": cls.FLOAT16,
            "fp16": cls.FLOAT16,
            "f16": cls.FLOAT16,
            "bf16": cls.BFLOAT16,
            "float": cls.FLOAT32,
            "fp32": cls.FLOAT32,
            "f32": cls.FLOAT32,
        }.get(str(value))


class Quantization(StrEnum):
    """Whether weights that a checkpoint stores as small integers are computed as such."""

    AUTO = "auto"
    """Where there are kernels for it, unless --dtype names a float type for them."""
    GGUF = "gguf"
    """Always: what cannot be is refused."""
    NONE = "none"
    """Never: they become floats of --dtype as they are read."""


class WeightUpdatePolicy(StrEnum):
    """What becomes of the weights that serve while others are loaded."""

    OFFLOAD = "offload"
    """They are kept until the others are there, and serve on if those never are."""
    DISCARD = "discard"
    """They are given up before, which saves their memory; without the others nothing serves."""


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how it is computed."""

    model: Annotated[
        str | None,
        Meta(
            description="a directory with safetensors, a GGUF file or a hub id; "
            "without it the embedded SmolLM2-135M-Instruct is served",
            extra=flags("--model-path", "-m"),
        ),
    ] = None
    served_model_name: Annotated[
        tuple[ModelName, ...],
        Meta(
            description="names clients may use; the first is the one reported",
            extra=flags("--alias"),
        ),
    ] = ()
    device: Annotated[
        str,
        Meta(
            description="what a rank computes on: cpu, cuda, or cuda:N for the GPU of a machine's "
            "first rank, behind which the others have the next ones; auto is cuda where torch sees "
            "a GPU, else cpu"
        ),
    ] = "auto"
    dtype: Annotated[
        Dtype,
        Meta(
            description="auto follows the checkpoint where the device computes it natively, "
            "else float32"
        ),
    ] = Dtype.AUTO
    quantization: Annotated[
        Quantization,
        Meta(
            description="auto computes the quantized weights of GGUF files as small integers, "
            "where the processor has AVX2 and --dtype is auto, and never on CUDA; none turns them "
            "into floats of --dtype; gguf refuses to start where they would be",
            extra=flags("-q"),
        ),
    ] = Quantization.AUTO
    max_model_len: Annotated[
        ContextTokens | None,
        Meta(
            description="longest prompt plus answer, in tokens; the model's own by default",
            extra=flags("--context-length"),
        ),
    ] = None
    seed: Annotated[
        int | None,
        Meta(
            description="seed of requests that name none; else each draws its own",
            extra=flags("--random-seed"),
        ),
    ] = None
    deterministic: Annotated[
        bool,
        Meta(
            description="answer a request with the same tokens whatever runs beside it, however "
            "its prompt is cut and whatever is cached of it; slower",
            extra=flags("--enable-deterministic-inference"),
        ),
    ] = False
    logits_processors: Annotated[
        tuple[ModelName, ...],
        Meta(
            description="installed logits processors that requests may name: entry points of the "
            "group drumline.logits_processors"
        ),
    ] = ()
    weight_version: Annotated[
        ModelName,
        Meta(description="what answers call the weights that are loaded at start"),
    ] = "default"
    weight_update_policy: Annotated[
        WeightUpdatePolicy,
        Meta(
            description="whether weights that serve are kept until an update of them is complete; "
            "discard writes over them, and blocks the engine until its restart if that fails"
        ),
    ] = WeightUpdatePolicy.OFFLOAD
    weight_update_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=86400)],
        Meta(
            description="seconds that a trainer's group may take to meet, or to send one tensor, "
            "for which the engine waits"
        ),
    ] = 60.0

    def __post_init__(self) -> None:
        if _DEVICE.fullmatch(self.device) is None:
            raise ConfigError(
                "--device", f"{self.device!r} is no device; say auto, cpu, cuda or cuda:N"
            )
