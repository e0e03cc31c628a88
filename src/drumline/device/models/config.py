"""What a checkpoint says of its model, in one form for every file format.

It reads config.json or GGUF metadata, and refuses by name what the decoder
does not compute. It touches no tensors.
"""

from pathlib import Path
from typing import Any

from msgspec import Struct

from drumline.core.errors import ConfigError, quoted
from drumline.core.gguf_file import GgufFile, TensorType


class LinearRope(Struct, frozen=True):
    """All positions are divided by `factor`."""

    factor: float


class Llama3Rope(Struct, frozen=True):
    """Long wavelengths are stretched by `factor`, short ones kept, with a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


QUANTIZED = "quantized"


class DecoderConfig(Struct, frozen=True, kw_only=True):
    """A Llama-like decoder: its sizes, and which of the family's variations it has."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope_theta: float
    rope_scaling: LinearRope | Llama3Rope | None = None
    windows: tuple[int | None, ...]
    """Per layer, how many tokens back attention reads, itself included; None reads all."""
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    stored_dtype: str = "float32"
    """The float type of the checkpoint; `QUANTIZED` where it has none."""


_HF_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_MOST = (1 << 31) - 1
_MOST_LAYERS = 10_000


def context_tokens(asked: int | None, config: DecoderConfig) -> int:
    """Return the longest context served: as asked, else the model's.

    Raises ConfigError for more than the model has positions.
    """
    if asked is not None and asked > config.max_positions:
        raise ConfigError(
            "--max-model-len",
            f"{asked} is beyond the model's context of {config.max_positions} tokens",
        )
    return asked or config.max_positions


def from_json(path: Path, config: dict[str, Any], generation: dict[str, Any]) -> DecoderConfig:
    """Return the decoder of a Hugging Face `config`, read from `path`."""

    def refuse(reason: str) -> ConfigError:
        return ConfigError(str(path), reason)

    names = config.get("architectures")
    architecture = str(names[0] if isinstance(names, list) and names else config.get("model_type"))
    if architecture not in _HF_ARCHITECTURES:
        raise refuse(
            f"architecture {architecture!r} is not supported; supported are "
            + ", ".join(_HF_ARCHITECTURES)
        )
    if quantization := _mapping(path, config, "quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise refuse(f"quantization {method!r} is not supported; use plain weights or a GGUF file")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise refuse(f"hidden_act {act!r} is not supported; silu is")

    qwen = architecture.startswith("Qwen")
    heads = _integer(path, config, "num_attention_heads")
    hidden = _integer(path, config, "hidden_size")
    layers = _integer(path, config, "num_hidden_layers", most=_MOST_LAYERS)
    attention_bias = _flag(path, config, "attention_bias")
    theta, scaling = _rope_from_json(path, config)
    ends = path.with_name("generation_config.json"), generation
    if "eos_token_id" not in generation:
        ends = path, config
    return _checked(
        path,
        DecoderConfig(
            architecture=architecture,
            vocab_size=_integer(path, config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(path, config, "intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=_integer(path, config, "num_key_value_heads", heads),
            head_dim=_integer(path, config, "head_dim", hidden // heads),
            norm_eps=_number(path, config, "rms_norm_eps", 1e-6, zero=True),
            max_positions=_integer(path, config, "max_position_embeddings"),
            rope_theta=theta,
            rope_scaling=scaling,
            windows=_windows(path, config, layers, qwen),
            tied_embeddings=_flag(path, config, "tie_word_embeddings"),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            mlp_bias=_flag(path, config, "mlp_bias"),
            qk_norm=architecture == "Qwen3ForCausalLM",
            eos_token_ids=_ids(*ends, "eos_token_id"),
            stored_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        ),
    )


def from_gguf(file: GgufFile) -> DecoderConfig:
    """Return the decoder that a GGUF file's metadata and tensor names describe."""
    architecture = str(file.require("general.architecture"))
    if architecture not in _GGUF_ARCHITECTURES:
        raise ConfigError(
            str(file.path),
            f"architecture {architecture!r} is not supported; supported in GGUF files are "
            + ", ".join(_GGUF_ARCHITECTURES),
        )
    metadata = {key.removeprefix(f"{architecture}."): value for key, value in file.metadata.items()}

    def integer(key: str, default: int | None = None, most: int = _MOST) -> int:
        return _integer(file.path, metadata, key, default, most)

    heads = integer("attention.head_count")
    hidden = integer("embedding_length")
    layers = integer("block_count", most=_MOST_LAYERS)
    head_dim = integer("attention.key_length", hidden // heads if heads else 0)
    if integer("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(
            str(file.path), "rotates only part of a head (rope.dimension_count); not supported"
        )
    embedding = file.tensors.get("token_embd.weight")
    window = (
        integer("attention.sliding_window") if metadata.get("attention.sliding_window") else None
    )
    return _checked(
        file.path,
        DecoderConfig(
            architecture=architecture,
            vocab_size=_entries(file) if embedding else integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=integer("feed_forward_length"),
            layers=layers,
            heads=heads,
            kv_heads=integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            norm_eps=_number(
                file.path, metadata, "attention.layer_norm_rms_epsilon", 1e-5, zero=True
            ),
            max_positions=integer("context_length"),
            rope_theta=_number(file.path, metadata, "rope.freq_base", 10000.0),
            rope_scaling=_rope_from_gguf(file.path, metadata),
            windows=(window,) * layers,
            tied_embeddings="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            output_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_down.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            eos_token_ids=tuple(
                dict.fromkeys(
                    id_
                    for name in ("eos", "eot")
                    for id_ in _ids(file.path, file.metadata, f"tokenizer.ggml.{name}_token_id")
                )
            ),
            stored_dtype=_stored_dtype(file),
        ),
    )


def _integer(
    path: Path, values: dict[str, Any], key: str, default: int | None = None, most: int = _MOST
) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(
            str(path), f"expected an integer {key} from 1 to {most}, {_found(values, key)}"
        )
    return value


def _number(
    path: Path,
    values: dict[str, Any],
    key: str,
    default: float | None = None,
    *,
    zero: bool = False,
) -> float:
    value = values.get(key)
    if value is None:
        value = default
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value <= _MOST
        or not (value or zero)
    ):
        least = "from 0 to" if zero else "above 0 and at most"
        raise ConfigError(
            str(path), f"expected a number {key} {least} {_MOST}, {_found(values, key)}"
        )
    return float(value)


def _flag(path: Path, values: dict[str, Any], key: str) -> bool:
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(str(path), f"expected {key} to be true or false, {_found(values, key)}")
    return bool(value)


def _mapping(path: Path, values: dict[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(str(path), f"expected an object {key}, {_found(values, key)}")
    return value


def _found(values: dict[str, Any], key: str) -> str:
    value = values.get(key)
    return "lacks it" if value is None else f"has {quoted(value)}"


def _ids(path: Path, values: dict[str, Any], key: str) -> tuple[int, ...]:
    value = values.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in ids):
        raise ConfigError(
            str(path), f"expected {key} to be a token id or a list of them, {_found(values, key)}"
        )
    return tuple(dict.fromkeys(ids))


def _entries(file: GgufFile) -> int:
    """Return how many tokens a file has vectors for."""
    shape = file.tensors["token_embd.weight"].shape
    if not 1 <= shape[0] <= _MOST:
        raise ConfigError(
            str(file.path), f"tensor token_embd.weight has shape {shape}: no vector for any token"
        )
    return shape[0]


def _rope_from_json(
    path: Path, config: dict[str, Any]
) -> tuple[float, LinearRope | Llama3Rope | None]:
    # Newer files keep the base and the scaling together, older ones apart.
    rope = _mapping(path, config, "rope_parameters") or _mapping(path, config, "rope_scaling")
    theta = _number(path, {"rope_theta": config.get("rope_theta"), **rope}, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConfigError(str(path), f"partial_rotary_factor {partial!r} is not supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRope(_number(path, rope, "factor"))
    if kind == "llama3":
        low, high = (_number(path, rope, f"{end}_freq_factor") for end in ("low", "high"))
        if low >= high:
            raise ConfigError(
                str(path),
                f"expected a high_freq_factor above the low_freq_factor of {low}, has {high}",
            )
        original = _integer(path, rope, "original_max_position_embeddings")
        return theta, Llama3Rope(_number(path, rope, "factor"), low, high, original)
    raise ConfigError(
        str(path), f"rope scaling {kind!r} is not supported; default, linear and llama3 are"
    )


def _rope_from_gguf(path: Path, metadata: dict[str, Any]) -> LinearRope | None:
    # The llama3 kind is stored as a tensor of factors instead.
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return LinearRope(_number(path, metadata, "rope.scaling.factor", 1.0))
    raise ConfigError(str(path), f"rope scaling {kind!r} is not supported; none and linear are")


def _windows(path: Path, config: dict[str, Any], layers: int, qwen: bool) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if window is None or (qwen and not config.get("use_sliding_window", False)):
        return (None,) * layers
    window = _integer(path, config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ConfigError(
                str(path), f"expected {layers} layer_types, {_found(config, 'layer_types')}"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    # Zero is a value of its own here: every layer has a window.
    zero = config.get("max_window_layers") == 0
    first = 0 if not qwen or zero else _integer(path, config, "max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(layers))


def _stored_dtype(file: GgufFile) -> str:
    kinds = {entry.type for entry in file.tensors.values() if len(entry.shape) > 1}
    plain = {
        TensorType.F32: "float32",
        TensorType.F16: "float16",
        TensorType.BF16: "bfloat16",
    }
    return plain[kinds.pop()] if len(kinds) == 1 and kinds <= plain.keys() else QUANTIZED


def _checked(path: Path, config: DecoderConfig) -> DecoderConfig:
    if config.heads % config.kv_heads:
        raise ConfigError(
            str(path), f"{config.heads} attention heads cannot share {config.kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise ConfigError(str(path), f"head_dim {config.head_dim} is odd; rotation needs pairs")
    return config
