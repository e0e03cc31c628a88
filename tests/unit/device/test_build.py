"""The builder resolves what was left open, and refuses by name and number what cannot be."""

import json
import logging
import re

import msgspec
import pytest
import torch

from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.core.config import CacheConfig, Dtype
from drumline.core.errors import ConfigError, InvariantError
from drumline.device import backends, budget
from drumline.device import build as builder
from drumline.device.budget import pool_pages
from drumline.device.choice import Room
from drumline.device.forward_thread import ForwardThread

from .conftest import Rig, small_config

MIB = 1 << 20
PAGE_BYTES = 2 * 3 * 2 * 16 * 16 * 4
"""K and V, layers, KV heads, head dimensions, tokens, float32: a page of the small models."""


@pytest.fixture
def thread():
    thread = ForwardThread()
    yield thread
    thread.stop()


def test_the_specs_say_what_was_built(checkpoint, thread):
    config = small_config(checkpoint("llama")[1], pages=50)
    built = builder.build(config, thread)
    specs = built.specs
    assert specs.groups == (CacheGroup(group_id="full", kind=AttentionKind.FULL, block_tokens=16),)
    assert (specs.num_pages, specs.bytes_per_page, specs.kv_tokens) == (50, PAGE_BYTES, 49 * 16)
    assert (specs.max_rows, specs.max_scheduled_tokens, specs.prefix_granularity) == (8, 2048, 64)
    assert specs.model.name == str(checkpoint("llama")[1])
    assert (specs.model.architecture, specs.model.dtype) == ("LlamaForCausalLM", "float32")
    assert (specs.model.vocab_size, specs.model.max_model_len) == (320, 256)
    assert specs.model.eos_token_ids == (2,)
    assert specs.backend.endswith("kernels")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(specs), type=type(specs)) == specs
    assert built.startup.pool_bytes == 50 * PAGE_BYTES


def with_model(config, **changes):
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **changes))


def test_a_context_beyond_the_model_s_is_refused_with_both(checkpoint, thread):
    config = small_config(checkpoint("llama")[1])
    assert (
        builder.build(with_model(config, max_model_len=100), thread).specs.model.max_model_len
        == 100
    )
    with pytest.raises(ConfigError, match=r"--max-model-len: 257 is beyond .* context of 256"):
        builder.build(with_model(config, max_model_len=257), thread)


def test_a_context_is_served_to_its_last_token(checkpoint):
    model, directory = checkpoint("llama")
    device = Rig(small_config(directory))
    try:
        prompt = [i % 320 for i in range(250)]
        tokens = device.generate(1, "a", prompt, 6, blocks=range(1, 17))
        ids = torch.tensor([prompt + tokens[:-1]])
        with torch.inference_mode():
            expected = model(ids).logits[0, 249:].argmax(1).tolist()
        assert tokens == expected
    finally:
        device.plane.shutdown()


def test_a_granularity_that_no_pages_fill_is_refused(checkpoint, thread):
    with pytest.raises(ConfigError, match=r"--prefix-granularity: 24 is no multiple .* 16"):
        builder.build(small_config(checkpoint("llama")[1], prefix_granularity=24), thread)


def test_a_failed_build_leaves_the_thread_usable(checkpoint, thread):
    config = small_config(checkpoint("llama")[1])
    with pytest.raises(ConfigError):
        builder.build(with_model(config, model="/no/such/model"), thread)
    assert builder.build(config, thread).specs.model.vocab_size == 320


@pytest.mark.parametrize(
    ("asked", "stored", "native", "used"),
    [
        (Dtype.AUTO, "float32", True, torch.float32),
        (Dtype.AUTO, "bfloat16", True, torch.bfloat16),
        (Dtype.AUTO, "float16", True, torch.bfloat16),
        (Dtype.AUTO, "quantized", True, torch.bfloat16),
        (Dtype.AUTO, "bfloat16", False, torch.float32),
        (Dtype.AUTO, "quantized", False, torch.float32),
        (Dtype.BFLOAT16, "float32", False, torch.bfloat16),
        (Dtype.FLOAT16, "bfloat16", False, torch.float16),
    ],
)
def test_the_float_type_is_the_one_asked_for_or_the_natural_one(
    monkeypatch, caplog, asked, stored, native, used
):
    monkeypatch.setattr(backends, "has_native_bfloat16", lambda: native)
    with caplog.at_level(logging.INFO):
        assert backends.resolve_dtype(asked, stored) is used
    falls_back = asked is Dtype.AUTO and stored != "float32" and not native
    assert ("no native bfloat16" in caplog.text) == falls_back


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16])
def test_half_precision_serves_and_halves_the_pages(checkpoint, dtype):
    model, directory = checkpoint("llama")
    device = Rig(small_config(directory, dtype=dtype))
    try:
        assert device.built.specs.bytes_per_page == PAGE_BYTES // 2
        prompt = list(range(40))
        tokens = device.generate(1, "a", prompt, 8)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, 39:]
        lost = logits.max(1).values - logits[torch.arange(8), torch.tensor(tokens)]
        # Not the float32 model's own choice always, but never far from it.
        assert lost.max() < 0.05 * (logits.max() - logits.min())
    finally:
        device.plane.shutdown()


def pages(available_mib=1024, weights_mib=100, **cache):
    room = Room(available_mib * MIB, available_mib * MIB)
    return pool_pages(CacheConfig(**cache), PAGE_BYTES, weights_mib * MIB, room)


def test_the_pool_is_as_large_as_was_asked():
    assert pages(kv_cache_size="96MiB") == 96 * MIB // PAGE_BYTES
    assert pages(max_total_tokens=1000) == 63 + 1
    assert pages(gpu_memory_utilization=0.5) == (512 - 100 - 256) * MIB // PAGE_BYTES


@pytest.mark.parametrize(
    ("how", "flag", "numbers"),
    [
        (
            {"kv_cache_size": "700MiB"},
            "--kv-cache-size",
            ("699 MiB", "356 MiB", "1024 MiB", "lower it to 668MiB or less"),
        ),
        ({"max_total_tokens": 10**7}, "--max-total-tokens", ("356 MiB", "1024 MiB", "lower it to")),
        (
            {"gpu_memory_utilization": 0.2},
            "--gpu-memory-utilization",
            ("0 KV pages", "1024 MiB", "raise it to 0.35 or more"),
        ),
        (
            {"kv_cache_size": "10kb"},
            "--kv-cache-size",
            ("0 KV pages", "at least 2", "raise it to 1MiB or more"),
        ),
        (
            {"kv_cache_size": "10kb", "available_mib": 300},
            "--kv-cache-size",
            ("no value of it helps", "356 MiB", "300 MiB", "smaller model"),
        ),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_its_flag_and_numbers(how, flag, numbers):
    with pytest.raises(ConfigError) as caught:
        pages(**how)
    assert caught.value.setting == flag
    for number in numbers:
        assert number in caught.value.reason


@pytest.mark.parametrize(
    ("how", "flag"),
    [
        ({"kv_cache_size": "700MiB"}, "kv_cache_size"),
        ({"kv_cache_size": "10kb"}, "kv_cache_size"),
        ({"max_total_tokens": 10**7}, "max_total_tokens"),
        ({"gpu_memory_utilization": 0.2}, "gpu_memory_utilization"),
    ],
)
def test_the_value_that_a_refusal_names_will_do(how, flag):
    with pytest.raises(ConfigError) as caught:
        pages(**how)
    named = re.search(r"it to (\S+) or", caught.value.reason)[1]
    kind = type(how[flag])
    assert pages(**{flag: kind(named)}) >= 2


def test_memory_is_asked_for_before_weights_are_read(checkpoint, thread, monkeypatch):
    monkeypatch.setattr(budget, "available_bytes", lambda: 10 * MIB)
    monkeypatch.setattr(builder.WeightLoader, "load", None)
    with pytest.raises(ConfigError, match="10 MiB are available"):
        builder.build(small_config(checkpoint("llama")[1]), thread)


def test_the_model_is_reported_under_the_first_name_the_operator_gave(checkpoint, thread):
    config = small_config(checkpoint("qwen3")[1])
    named = with_model(config, served_model_name=("mine", "also"))
    assert builder.build(named, thread).specs.model.name == "mine"


def test_a_broken_checkpoint_is_refused_by_name(checkpoint, thread, tmp_path):
    source = checkpoint("llama")[1]
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 111}))
    with pytest.raises(ConfigError, match=r"gate_proj\.weight has shape \(112, 64\).*\(111, 64\)"):
        builder.build(small_config(tmp_path), thread)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"lacks the tensor model\.layers\.3\."):
        builder.build(small_config(tmp_path), thread)


@pytest.mark.parametrize(
    ("claimed", "said"),
    [
        ({"vocab_size": 10**8}, "tensor model.embed_tokens.weight has shape"),
        ({"num_hidden_layers": 10_000}, "lacks the tensor model.layers.3."),
        ({"head_dim": 1 << 20}, "tensor model.layers.0.self_attn.q_proj.weight has shape"),
        ({"intermediate_size": 1 << 30}, "tensor model.layers.0.mlp.gate_proj.weight has shape"),
    ],
)
def test_sizes_that_no_memory_holds_are_refused_over_the_file_that_claims_them(
    checkpoint, thread, tmp_path, claimed, said
):
    source = checkpoint("llama")[1]
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | claimed))
    with pytest.raises(ConfigError) as refusal:
        builder.build(small_config(tmp_path), thread)
    assert str(tmp_path) in str(refusal.value)
    assert said in str(refusal.value)


def test_stopping_runs_what_was_queued_and_is_idempotent():
    thread, ran = ForwardThread(), []
    thread.submit(lambda: ran.append(1))
    thread.stop()
    thread.stop()
    assert ran == [1]
    assert not thread.alive
    with pytest.raises(InvariantError, match="gone"):
        thread.call(lambda: None)
