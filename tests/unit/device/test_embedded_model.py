"""The embedded model says what `transformers` makes of the same weights in float32."""

from functools import partial

import gguf
import numpy as np
import pytest
import torch
import transformers

from drumline.contract.request import Sampling
from drumline.core.config import (
    CacheConfig,
    Config,
    Dtype,
    KvCacheDtype,
    ModelConfig,
    Quantization,
    ScheduleConfig,
)
from drumline.core.gguf_file import read_gguf
from drumline.core.model_files import find_model
from drumline.device.attention import AttentionBatch
from drumline.device.kv import BlockTable
from drumline.device.weights.gguf import gguf_name
from drumline.frontend.text.gguf_tokenizer import gguf_tokenizer

from .conftest import Rig, ints
from .plain_english import TEXTS
from .small_rank import SmallDevice, SmallRank

PROMPTS = 20
TOKENS = 64


@pytest.fixture(scope="module")
def transformers_model():
    """The model of the embedded file, dequantized by the format's own package."""
    file = read_gguf(find_model(None).path)
    data = np.memmap(file.path, np.uint8, mode="r")
    read = file.metadata.__getitem__
    config = transformers.LlamaConfig(
        vocab_size=read("llama.vocab_size"),
        hidden_size=read("llama.embedding_length"),
        intermediate_size=read("llama.feed_forward_length"),
        num_hidden_layers=read("llama.block_count"),
        num_attention_heads=read("llama.attention.head_count"),
        num_key_value_heads=read("llama.attention.head_count_kv"),
        max_position_embeddings=read("llama.context_length"),
        rms_norm_eps=read("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": read("llama.rope.freq_base")},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = {}
    for name in model.state_dict():
        stored = "token_embd.weight" if name == "lm_head.weight" else gguf_name(name)
        entry = file.tensors[stored]
        raw = data[entry.offset : entry.offset + entry.bytes]
        tensor = gguf.dequantize(
            raw.reshape(entry.shape[0], -1), gguf.GGMLQuantizationType(entry.type)
        ).reshape(entry.shape)
        for part, heads in (("q_proj", 9), ("k_proj", 3)):
            if part in name:
                tensor = tensor.reshape(heads, -1, 2, 576).swapaxes(1, 2).reshape(entry.shape)
        weights[name] = torch.from_numpy(tensor.copy())
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def test_greedy_ids_of_twenty_prompts_are_those_of_transformers(transformers_model):
    random = np.random.default_rng(135)
    config = Config(
        model=ModelConfig(dtype=Dtype.FLOAT32),
        cache=CacheConfig(max_total_tokens=16 * 8 * PROMPTS),
        schedule=ScheduleConfig(max_num_seqs=PROMPTS),
    )
    device = Rig(config)
    prompts = [random.integers(100, 49152, random.integers(1, 25)).tolist() for _ in range(PROMPTS)]
    said = [[] for _ in prompts]
    try:
        plans = []
        for row, prompt in enumerate(prompts, 1):
            plans.append(device.plan([(row, 64)], **device.start(row, f"r{row}", prompt)))
        plans += [device.plan(decodes=range(1, PROMPTS + 1)) for _ in range(TOKENS - 1)]
        tickets = [device.execute(plan) for plan in plans]
        for plan, ticket in zip(plans, tickets, strict=True):
            tokens = device.plane.complete(ticket).tokens
            for row, token in zip(plan.batch.rows, tokens, strict=True):
                said[row - 1].append(int(token))
    finally:
        device.plane.shutdown()
    for prompt, ours in zip(prompts, said, strict=True):
        # Its most likely id behind each prefix of ours: equal throughout, the greedy texts are.
        with torch.inference_mode():
            logits = transformers_model(torch.tensor([prompt + ours[:-1]])).logits
        assert logits[0, len(prompt) - 1 :].argmax(1).tolist() == ours


def logits_of_texts(quantization, kept):
    """Return each text's ids, and what the model makes of each of these, as log probabilities."""
    tokenizer = gguf_tokenizer(read_gguf(find_model(None).path))
    texts = [torch.tensor(tokenizer.encode(text, add_special=False)) for text in TEXTS]
    device = Rig(
        Config(
            model=ModelConfig(dtype=Dtype.FLOAT32, quantization=quantization),
            cache=CacheConfig(max_total_tokens=16 * 40, kv_cache_dtype=kept),
            schedule=ScheduleConfig(max_num_seqs=1),
        )
    )
    try:
        assert device.built.specs.kv_dtype == kept
        logits = [device.thread.call(partial(_logits_of, device, ids)) for ids in texts]
    finally:
        device.plane.shutdown()
    return texts, [each.log_softmax(1) for each in logits]


@pytest.fixture(scope="module")
def in_floats():
    return logits_of_texts(Quantization.NONE, KvCacheDtype.FLOAT32)


@pytest.mark.parametrize(
    ("quantization", "kept", "mean", "most"),
    [
        (Quantization.GGUF, KvCacheDtype.FLOAT32, 0.004, 0.06),
        (Quantization.GGUF, KvCacheDtype.BFLOAT16, 0.004, 0.06),
        (Quantization.GGUF, KvCacheDtype.INT8, 0.004, 0.15),
        (Quantization.NONE, KvCacheDtype.INT8, 0.001, 0.04),
    ],
)
@torch.inference_mode()
def test_what_is_stored_small_is_as_good_as_floats_of_it(in_floats, quantization, kept, mean, most):
    texts, in_full = in_floats
    assert all(len(ids) > 380 for ids in texts)
    _, in_small = logits_of_texts(quantization, kept)
    following = torch.cat([ids[1:] for ids in texts]).unsqueeze(1)
    lost = [
        -torch.cat([each[:-1] for each in logits]).gather(1, following).mean()
        for logits in (in_full, in_small)
    ]
    exact, ours = torch.cat(in_full), torch.cat(in_small)
    assert abs(float((lost[1] - lost[0]).exp()) - 1) < 0.01
    divergence = (exact.exp() * (exact - ours)).sum(1)
    assert float(divergence.mean()) <= mean
    # Where the next word is open, a token here and there is far less exact than most.
    assert float(divergence.max()) < most
    best = exact.topk(2, 1)
    sure = best.values[:, 0] - best.values[:, 1] > 0.5
    assert int(sure.sum()) > 300
    assert torch.equal(ours.argmax(1)[sure], best.indices[:, 0][sure])


def _logits_of(device, ids):
    executor = device.built.handle._executor
    table = BlockTable(2, 40)
    table.patch(
        np.ones(40, np.int32), np.arange(40, dtype=np.int32), np.arange(1, 41, dtype=np.int32)
    )
    shape = executor._attention.pool.shape
    batch = AttentionBatch(table, ints(1), ints(len(ids)), ints(0), shape)
    with torch.inference_mode():
        return executor._model.forward(ids, batch, executor._attention, torch.arange(len(ids)))


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.GGUF])
def test_with_deterministic_it_says_the_same_alone_and_in_company(quantization):
    model = {"deterministic": True, "quantization": quantization}
    device = SmallDevice(None, pages=40, model=model)
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 49152, length).tolist() for length in (37, 21)]
    ways = [Sampling(seed=1, top_p=0.9), Sampling(seed=2, temperature=1.2)]
    wants = {"max_new_tokens": 3, "return_logprob": True}
    alone = []
    for prompt, way in zip(prompts, ways, strict=True):
        rank = SmallRank(device, depth=0, caching=False)
        rank.submit("a", prompt, way, **wants)
        rank.finish()
        alone.append(rank.answer("a"))
    rank = SmallRank(device, chunk=33, retract=3)
    for which in (1, 0):
        rank.submit(f"{which}", prompts[which], ways[which], **wants)
    rank.finish()
    for which in range(2):
        told = rank.answer(f"{which}")
        assert (told.ids, told.logprobs) == (alone[which].ids, alone[which].logprobs)
    device.close()
