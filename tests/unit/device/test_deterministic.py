"""With `--deterministic`, nothing but a request itself decides what it is answered."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.contract.request import Sampling
from drumline.core.config import KvCacheDtype
from drumline.core.errors import ConfigError
from drumline.device import backends
from drumline.device.attention import AttentionBatch, TorchAttention
from drumline.device.fixed_attention import STRETCH, FixedAttention
from drumline.device.kernels.native import Found
from drumline.device.kv import BlockTable, KvPool
from drumline.device.kv_form import KvForm

from .conftest import ints
from .small_rank import GREEDY, SmallDevice, SmallRank

RANDOM = np.random.default_rng(77)
SHARED = RANDOM.integers(0, 320, 48).tolist()
PROMPTS = [
    SHARED[:1],
    SHARED[:33],
    SHARED + RANDOM.integers(0, 320, 9).tolist(),
    RANDOM.integers(0, 320, 23).tolist(),
    RANDOM.integers(0, 320, 64).tolist(),
]
WAYS = [
    GREEDY,
    Sampling(seed=3),
    Sampling(seed=4, top_p=0.9, temperature=1.5),
    Sampling(seed=5, typical_p=0.9, top_k=100, presence_penalty=0.5),
    Sampling(seed=6, min_p=0.01, temperature=3.0),
]
TOKENS = 14


def ask(rank, which, time=0):
    rank.submit(
        f"r{which}, time {time}",
        PROMPTS[which],
        WAYS[which],
        max_new_tokens=TOKENS,
        return_logprob=True,
        top_logprobs=2,
        prompt_logprobs_from=0 if which == 3 else -1,
    )


def said(rank, which, time=0):
    told = rank.answer(f"r{which}, time {time}")
    return told.ids, told.logprobs, told.top_logprobs, told.prompt and told.prompt.logprobs


COMPILED = [(family, True, KvCacheDtype.AUTO) for family in ("llama", "mistral, window", "qwen3")]
INT8 = KvCacheDtype.INT8


@pytest.fixture(
    scope="module",
    params=[
        *COMPILED,
        ("mistral, window", False, KvCacheDtype.AUTO),
        ("mistral, window", True, INT8),
        ("llama", False, INT8),
    ],
    ids=lambda way: f"{way[0]}, {'kernels of ours' if way[1] else 'torch alone'}, KV {way[2]}",
)
def fixed(request, checkpoint):
    family, compiled, kept = request.param
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(backends, "find_kernels", lambda _: Found(None, "a test wants none"))
        device = SmallDevice(
            checkpoint(family)[1],
            pages=40,
            model={"deterministic": True},
            kvstore=True,
            kv_cache_dtype=kept,
        )
    assert device.built.specs.kv_dtype == ("int8" if kept is INT8 else "float32")
    alone = []
    for which in range(len(PROMPTS)):
        rank = SmallRank(device, depth=0, caching=False)
        ask(rank, which)
        rank.finish()
        alone.append(said(rank, which))
        assert len(alone[-1][0]) == TOKENS
    yield device, alone
    device.close()


@given(data=st.data())
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_an_answer_is_the_same_bit_by_bit_in_any_company(fixed, data):
    device, alone = fixed
    rank = SmallRank(
        device,
        depth=data.draw(st.integers(0, 1), "depth"),
        chunk=data.draw(st.integers(1, 70), "chunk"),
        retract=data.draw(st.sampled_from([0, 3, 5]), "retract"),
        caching=data.draw(st.booleans(), "caching"),
    )
    for time in range(2):  # the second time, prefixes may be cached
        order = data.draw(st.permutations(range(len(PROMPTS))), "order")
        asked = order[: data.draw(st.integers(1, len(order)), "how many")]
        for which in asked:
            ask(rank, which, time)
            rank.run(data.draw(st.integers(0, 3), "rounds between"))
        rank.finish()
        for which in asked:
            assert said(rank, which, time) == alone[which]


def test_what_is_computed_in_blocks_is_what_the_model_says(fixed, checkpoint):
    device, alone = fixed
    with torch.inference_mode():
        for family in ("llama", "mistral, window", "qwen3"):
            model, directory = checkpoint(family)
            if str(directory) == device.config.model.model:
                ids = torch.tensor([PROMPTS[4] + alone[4][0]])
                table = model(ids).logits[0].log_softmax(-1)
                own = table[torch.arange(63, 63 + TOKENS), ids[0, 64:]]
                kept = device.config.cache.kv_cache_dtype
                far = 0.15 if kept is INT8 else 2e-4
                assert alone[4][1] == pytest.approx(own.tolist(), abs=far)


@pytest.mark.parametrize("window", [None, 30, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_to_long_contexts_is_exact_and_the_same_in_any_chunk(window, dtype):
    tokens, heads, kv_heads, dim = 2 * STRETCH + 40, 6, 2, 24
    generator = torch.Generator().manual_seed(3)

    def some(count):
        return torch.randn((tokens, count, dim), generator=generator).to(dtype)

    query, key, value = some(heads), some(kv_heads), some(kv_heads)

    def fed(kind, cuts):
        pool = KvPool(
            layers=1,
            blocks=80,
            block_tokens=16,
            kv_heads=kv_heads,
            head_dim=dim,
            form=KvForm(dtype),
            device=torch.device("cpu"),
        )
        table = BlockTable(2, 80)
        table.patch(np.ones(70, np.int32), np.arange(70, dtype=np.int32), np.arange(9, 79))
        attention, parts, start = kind(pool), [], 0
        for end in (*cuts, tokens):
            batch = AttentionBatch(table, ints(1), ints(end - start), ints(start), pool.shape)
            span = slice(start, end)
            parts.append(attention(0, query[span], key[span], value[span], batch, window))
            start = end
        return torch.cat(parts)

    whole = fed(FixedAttention, ())
    assert torch.isfinite(whole).all()
    close = {"atol": 2e-5, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    assert torch.allclose(whole, fed(TorchAttention, ()), **close)
    for cuts in ((1, 2, 3), (511, 512, 513), (700, 1030, 1031), range(1000, tokens)):
        assert torch.equal(fed(FixedAttention, cuts), whole)


def test_more_ranks_than_sum_alike_are_refused(checkpoint):
    class Three:
        index, size = 0, 3

        def least(self, value):
            return value

    with pytest.raises(ConfigError, match=r"--deterministic: 3 tensor-parallel ranks"):
        SmallDevice(checkpoint("llama")[1], tp=3, group=Three(), model={"deterministic": True})
