"""Logits agree with `transformers`, for each family and however a prompt is cut."""

import numpy as np
import pytest
import torch

from drumline.core.model_files import find_model
from drumline.device.attention import AttentionBatch, TorchAttention
from drumline.device.kv import BlockTable, KvPool
from drumline.device.kv_form import KvForm
from drumline.device.layers import Backend, TorchLinear
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.models.decoder import weight_count
from drumline.device.models.loading import load_decoder
from drumline.device.models.shard import shard_of
from drumline.device.parallel import Alone
from drumline.device.weights.store import WeightStore

from .conftest import FAMILIES, ints, native

TOKENS = 64
PAGE = 16
PROMPT = np.random.default_rng(3).integers(0, 320, TOKENS).astype(np.int32)


REFERENCE = Backend("torch", TorchLinear, TorchAttention)


class Loaded:
    """A decoder with memory of its own, fed without plans."""

    def __init__(
        self,
        directory,
        group=None,
        backend=REFERENCE,
        dtype=torch.float32,
        stage=0,
        stages=1,
    ):
        opened = open_checkpoint(find_model(directory and str(directory)))
        self.config = config = opened.config
        cpu = torch.device("cpu")
        group = group or Alone()
        shard = shard_of(config, group.index, group.size, stage, stages)
        self.decoder, _ = load_decoder(
            config,
            opened.weights,
            backend,
            WeightStore(dtype, cpu),
            group,
            shard=shard,
        )
        pool = KvPool(
            layers=len(shard.layers),
            blocks=32,
            block_tokens=PAGE,
            kv_heads=len(shard.kv_heads),
            head_dim=config.head_dim,
            form=KvForm(dtype, lines=backend is not REFERENCE),
            device=cpu,
        )
        self.attention, self.shape = backend.attention(pool), pool.shape
        self.table = BlockTable(4, 8)
        shuffled = np.random.default_rng(1).permutation(np.arange(1, 32)).astype(np.int32)
        for row in range(1, 4):
            columns = np.arange(8, dtype=np.int32)
            self.table.patch(np.full(8, row, np.int32), columns, shuffled[8 * row - 8 :][:8])

    def batch(self, rows, prefixes, chunks):
        lengths = ints(*map(len, chunks))
        return AttentionBatch(self.table, ints(*rows), lengths, ints(*prefixes), self.shape)

    @torch.inference_mode()
    def feed(self, rows, prefixes, chunks):
        """Return the logits of every token fed."""
        batch = self.batch(rows, prefixes, chunks)
        ids = torch.from_numpy(np.concatenate(chunks).astype(np.int64))
        return self.decoder.forward(ids, batch, self.attention, torch.arange(len(ids)))


@pytest.fixture(params=["torch", "native"])
def backend(request):
    return REFERENCE if request.param == "torch" else native(request.getfixturevalue("machine"))


@torch.inference_mode()
def reference(model, prompt):
    return model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0]


def assert_close(ours, theirs):
    assert ours.shape == theirs.shape
    assert ((ours - theirs).abs().max() / theirs.abs().max()).item() <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_at_every_chunk_size(checkpoint, backend, family):
    model, directory = checkpoint(family)
    loaded, expected = Loaded(directory, backend=backend), reference(model, PROMPT)
    assert (loaded.decoder.program is None) == (backend is REFERENCE)
    for size in range(1, TOKENS + 1):
        parts = [
            loaded.feed([1], [start], [PROMPT[start : start + size]])
            for start in range(0, TOKENS, size)
        ]
        assert_close(torch.cat(parts), expected)


@pytest.mark.parametrize("family", ["llama", "mistral, window", "qwen3"])
def test_logits_do_not_depend_on_the_rest_of_the_batch(checkpoint, backend, family):
    model, directory = checkpoint(family)
    loaded, random = Loaded(directory, backend=backend), np.random.default_rng(5)
    prompts = [random.integers(0, 320, length).astype(np.int32) for length in (64, 50, 33)]
    expected = [reference(model, prompt) for prompt in prompts]
    for _ in range(8):
        fed = [0, 0, 0]
        got = [[], [], []]
        while any(done < len(prompt) for done, prompt in zip(fed, prompts, strict=True)):
            running = [i for i in random.permutation(3) if fed[i] < len(prompts[i])]
            # Decodes and chunks of all sizes side by side.
            sizes = [int(random.choice([1, 1, 2, 7, 16, 40])) for _ in running]
            chunks = [
                prompts[i][fed[i] : fed[i] + size] for i, size in zip(running, sizes, strict=True)
            ]
            logits = loaded.feed([i + 1 for i in running], [fed[i] for i in running], chunks)
            for i, part in zip(
                running, logits.split([len(chunk) for chunk in chunks]), strict=True
            ):
                got[i].append(part)
                fed[i] += len(part)
        for parts, theirs in zip(got, expected, strict=True):
            assert_close(torch.cat(parts), theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_counted_right(checkpoint, family):
    model, directory = checkpoint(family)
    counted = weight_count(open_checkpoint(find_model(str(directory))).config)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert counted == matrices
