"""Weights come out of every file format as they went in, or the file is refused by name."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drumline.core.errors import ConfigError
from drumline.core.gguf_file import BLOCKS, TensorType
from drumline.core.model_files import find_model
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.weights.dequantize import dequantize
from drumline.device.weights.gguf import gguf_name
from drumline.device.weights.source import Cut, Span

from . import kquants
from .kquants import K_QUANTS
from .test_models import PROMPT, Loaded, assert_close, reference

SCALES = {
    TensorType.Q4_0: [0],
    TensorType.Q4_1: [0, 2],
    TensorType.Q5_0: [0],
    TensorType.Q5_1: [0, 2],
    TensorType.Q8_0: [0],
    TensorType.Q2_K: [80, 82],
    TensorType.Q3_K: [108],
    TensorType.Q4_K: [0, 2],
    TensorType.Q5_K: [0, 2],
    TensorType.Q6_K: [208],
}
"""Where a block of each format has its half-precision floats; all else may be any byte."""


@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_blocks_are_dequantized_as_the_format_s_authors_do(kind):
    random = np.random.default_rng(kind)
    values, size = BLOCKS[kind]
    # More blocks than are decoded at a time, and not a multiple of it.
    count = (1 << 18) // values * 2 + 3
    raw = random.integers(0, 256, (count, size), dtype=np.uint8)
    for offset in SCALES[kind]:
        scales = random.standard_normal(count).astype(np.float16)
        raw[:, offset : offset + 2] = scales.view(np.uint8).reshape(count, 2)
    out = torch.empty(count, values)
    dequantize(torch.from_numpy(raw).view(-1), kind, out)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType(kind))
    assert np.array_equal(out.numpy().reshape(-1), expected.reshape(-1))


def write_gguf(path, model, architecture, quantization=TensorType.F32):
    """Write a `transformers` model as a GGUF file, attention rows reordered as converters do.

    `quantization` is how matrices are stored, or a function from their names to that.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    stored = quantization if callable(quantization) else lambda _: quantization
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            halves = data.reshape(heads[part], 2, -1, *data.shape[1:])
            data = halves.swapaxes(1, 2).reshape(data.shape)
        kind = stored(gguf_name(name)) if data.ndim > 1 else TensorType.F32
        if data.shape[-1] % BLOCKS[kind][0]:
            kind = TensorType.F16
        number = gguf.GGMLQuantizationType(kind)
        written = kquants.quantize(data, kind) if kind in K_QUANTS else gguf.quantize(data, number)
        writer.add_tensor(gguf_name(name), written, raw_dtype=number)
    if config.rope_parameters["rope_type"] == "llama3":
        plain = 1 / config.rope_parameters["rope_theta"] ** (np.arange(0, 16, 2) / 16)
        scaled = model.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("llama", "llama"),
        ("llama, tied", "llama"),
        ("llama, biased", "llama"),
        ("llama, rope llama3", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(
    checkpoint, tmp_path, family, architecture
):
    model, _ = checkpoint(family)
    loaded = Loaded(write_gguf(tmp_path / "model.gguf", model, architecture))
    assert loaded.config.eos_token_ids == (2,)
    assert_close(loaded.feed([1], [0], [PROMPT]), reference(model, PROMPT))


@pytest.mark.parametrize("kind", [TensorType.F16, TensorType.BF16], ids=lambda kind: kind.name)
def test_half_precision_files_are_read(checkpoint, tmp_path, kind):
    model, _ = checkpoint("llama")
    loaded = Loaded(write_gguf(tmp_path / "model.gguf", model, "llama", kind))
    ours, theirs = loaded.feed([1], [0], [PROMPT]), reference(model, PROMPT)
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()
    assert loaded.config.stored_dtype == {1: "float16", 30: "bfloat16"}[kind]


def shard(directory, target):
    """Split a checkpoint's one file in two with an index."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, target / file)
        places.update(dict.fromkeys(part, file))
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return target


def test_a_sharded_checkpoint_is_read_by_its_index(checkpoint, tmp_path):
    model, directory = checkpoint("qwen2")
    loaded = Loaded(shard(directory, tmp_path))
    assert_close(loaded.feed([1], [0], [PROMPT]), reference(model, PROMPT))


def with_config(directory, target, config):
    """Put a checkpoint's weights beside another config."""
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").symlink_to(directory / "model.safetensors")
    return target


def opened(path):
    return open_checkpoint(find_model(str(path)))


def test_damaged_safetensors_are_refused_by_name(checkpoint, tmp_path):
    shard(checkpoint("llama")[1], tmp_path)
    second = tmp_path / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        second.write_bytes(whole[:cut])
        with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors: is truncated"):
            opened(tmp_path)
    second.unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors: is missing"):
        opened(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="weight_map"):
        opened(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(ConfigError, match=r"'\.\./b'"):
        opened(tmp_path)
    long = json.dumps({"weight_map": {"a": "n" * 300}})
    (tmp_path / "model.safetensors.index.json").write_text(long)
    with pytest.raises(ConfigError, match="nnn: is truncated or no safetensors file"):
        opened(tmp_path)


def test_a_directory_of_pickled_weights_is_refused_by_name(checkpoint, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoint("llama")[1] / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"neither model\.safetensors"):
        opened(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ConfigError, match=r"pickled weights \(pytorch_model\.bin\)"):
        opened(tmp_path)


@pytest.mark.parametrize("format_", ["safetensors", "gguf"])
def test_missing_and_misshapen_tensors_are_named_with_what_was_expected(
    checkpoint, tmp_path, format_
):
    model, directory = checkpoint("llama")
    if format_ == "gguf":
        path = write_gguf(tmp_path / "model.gguf", model, "llama")
        stored, at = "output_norm.weight", "model.gguf"
    else:
        path, stored, at = directory, "model.norm.weight", "model.safetensors"
    source = opened(path).weights
    with pytest.raises(ConfigError) as caught:
        source.read("model.norm.weight", torch.empty(65))
    for part in (at, stored, "(64,)", "(65,)"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"lacks the tensor .*(9|blk\.9).*\(3, 4\)"):
        source.read("model.layers.9.mlp.up_proj.weight", torch.empty(3, 4))


@pytest.mark.parametrize("format_", ["safetensors", "gguf"])
@pytest.mark.parametrize(
    ("part", "dim"), [("self_attn.q_proj", 0), ("mlp.down_proj", 0), ("mlp.down_proj", 1)]
)
def test_a_part_of_a_tensor_is_read_as_it_stands_in_the_whole(
    checkpoint, tmp_path, format_, part, dim
):
    model, path = checkpoint("llama")
    if format_ == "gguf":
        path = write_gguf(tmp_path / "model.gguf", model, "llama")
    source = opened(path).weights
    name = f"model.layers.1.{part}.weight"
    whole = torch.empty(model.state_dict()[name].shape)
    source.read(name, whole)
    own = torch.empty(whole.narrow(dim, 16, 32).shape)
    source.read(name, own, Cut(dim, Span(16, 48, whole.shape[dim])))
    assert torch.equal(own, whole.narrow(dim, 16, 32))
    with pytest.raises(ConfigError, match=r"\(99, \d+\)"):
        source.read(name, torch.empty(8, whole.shape[1]), Cut(0, Span(0, 8, 99)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "number factor above 0 and at most 2147483647, lacks it",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization 'gptq'"),
        ({"num_hidden_layers": None}, "num_hidden_layers from 1 to 10000, lacks it"),
        ({"hidden_size": "64"}, "hidden_size from 1 to 2147483647, has '64'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
    ],
)
def test_configs_that_cannot_be_served_are_refused_by_name(checkpoint, tmp_path, change, reason):
    directory = checkpoint("llama")[1]
    config = json.loads((directory / "config.json").read_text())
    with pytest.raises(ConfigError) as caught:
        opened(with_config(directory, tmp_path, config | change))
    assert reason in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_older_spellings_of_a_config_are_understood(checkpoint, tmp_path):
    directory = checkpoint("llama, rope llama3")[1]
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    older = {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config.pop("dtype")}
    with_config(directory, tmp_path, config | older | {"rope_scaling": rope})
    assert opened(tmp_path).config == opened(directory).config


def test_the_end_tokens_of_the_generation_config_win(checkpoint, tmp_path):
    directory = checkpoint("llama")[1]
    with_config(directory, tmp_path, json.loads((directory / "config.json").read_text()))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert opened(tmp_path).config.eos_token_ids == (5, 9)


def test_gguf_architectures_that_cannot_be_served_are_refused_by_name(checkpoint, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", checkpoint("qwen2")[0], "gemma")
    with pytest.raises(ConfigError, match=r"model\.gguf: architecture 'gemma' is not supported"):
        opened(path)
