"""What a long context costs: decode steps at two contexts, and a chunk's attention.

    python -m benchmarks.attention [--json FILE] [--rounds N] [--threads N] [--no-chunk]

On the embedded model, its weights as they are stored. A step of one row behind 4,096 tokens is
compared with one behind 256, for each type that keys and values are kept as; it fails where it
takes more than 2.2 times as long with bfloat16 or 1.7 times with int8. Of a chunk of 2,048 tokens
behind as many, it says what share of the forward is attention. Cases are measured in turn, and
figures are the least of their rounds, in ms, which busy neighbours change least.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import machine, write
from drumline.core.config import KvCacheDtype, ModelConfig
from drumline.core.model_files import find_model
from drumline.device.attention import AttentionBatch
from drumline.device.backends import chosen
from drumline.device.budget import available_bytes
from drumline.device.kv import BlockTable, KvPool
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.models.shard import shard_of
from drumline.device.page import BLOCK_TOKENS
from drumline.device.parallel import Alone
from drumline.device.weight_loader import WeightLoader

SHORT, LONG, CHUNK = 256, 4096, 2048
BARS = {KvCacheDtype.BFLOAT16: 2.2, KvCacheDtype.INT8: 1.7, KvCacheDtype.FLOAT32: None}
CPU = torch.device("cpu")


class Subject:
    """The model with a pool of each type, whose contexts are a chunk's own keys and values."""

    def __init__(self):
        checkpoint = open_checkpoint(find_model(None))
        self.model = model = checkpoint.config
        ways = {kept: chosen(ModelConfig(), model, 1, kept) for kept in BARS}
        how = ways[KvCacheDtype.BFLOAT16]
        loader = WeightLoader(
            model,
            how.backend,
            how.dtype,
            CPU,
            Alone(),
            how.apportioned,
            available_bytes,
            shard_of(model),
        )
        self.backend = how.backend.name
        self.decoder = loader.load(checkpoint).decoder
        self.columns = LONG // BLOCK_TOKENS + 1
        self.table = BlockTable(2, self.columns)
        columns = np.arange(self.columns, dtype=np.int32)
        blocks = np.random.default_rng(1).permutation(self.columns).astype(np.int32) + 1
        self.table.patch(np.ones(self.columns, np.int32), columns, blocks)
        self.attentions = {kept: self._attention(way) for kept, way in ways.items()}

    def _attention(self, way):
        model = self.model
        pool = KvPool(
            layers=model.layers,
            blocks=self.columns + 1,
            block_tokens=BLOCK_TOKENS,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            form=way.kv_form,
            device=CPU,
        )
        slots = torch.arange(self.columns + 1)[:, None] * pool.shape.rows
        slots = (slots + torch.arange(BLOCK_TOKENS)).flatten()
        size = (2, len(slots), model.kv_heads, model.head_dim)
        for layer in range(model.layers):
            pool.store(layer, slots, *torch.randn(size))
        return way.backend.attention(pool)

    @torch.inference_mode()
    def forward(self, kept, tokens, prefix):
        """Return how long a forward of one row takes, in ms."""
        attention = self.attentions[kept]
        batch = self._batch(attention, tokens, prefix)
        ids = torch.arange(tokens, dtype=torch.int64) * 31 % self.model.vocab_size
        last = torch.tensor([tokens - 1])
        start = time.perf_counter()
        self.decoder.forward(ids, batch, attention, last)
        return (time.perf_counter() - start) * 1e3

    @torch.inference_mode()
    def attend(self, kept, tokens, prefix):
        """Return how long the attention of such a forward takes, in ms."""
        attention, model = self.attentions[kept], self.model
        batch = self._batch(attention, tokens, prefix)
        query = torch.randn(tokens, model.heads, model.head_dim)
        key, value = torch.randn(2, tokens, model.kv_heads, model.head_dim)
        start = time.perf_counter()
        for layer in range(model.layers):
            attention(layer, query, key, value, batch, None)
        return (time.perf_counter() - start) * 1e3

    def _batch(self, attention, tokens, prefix):
        row, lengths, prefixes = (np.array([each], np.int32) for each in (1, tokens, prefix))
        return AttentionBatch(self.table, row, lengths, prefixes, attention.pool.shape)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--rounds", type=int, default=40)
    arguments.add_argument("--threads", type=int)
    arguments.add_argument("--no-chunk", action="store_true", help="decode steps only")
    asked = arguments.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    subject = Subject()
    steps: dict[KvCacheDtype, dict[int, list[float]]] = {
        kept: {SHORT: [], LONG: []} for kept in BARS
    }
    for _ in range(asked.rounds):
        for kept, contexts in steps.items():
            for context, times in contexts.items():
                times.append(min(subject.forward(kept, 1, context - 1) for _ in range(3)))
    figures, failures = {}, []
    for kept, contexts in steps.items():
        short, long = (min(contexts[context]) for context in (SHORT, LONG))
        figures[kept] = {
            f"step at {SHORT}": round(short, 2),
            f"step at {LONG}": round(long, 2),
            "times": round(long / short, 2),
            "at most": BARS[kept],
        }
        bar = BARS[kept]
        if bar and long > bar * short:
            failures.append(f"{kept}: {long / short:.2f} times, at most {bar}")
    if not asked.no_chunk:
        for kept in BARS:
            whole = min(subject.forward(kept, CHUNK, CHUNK) for _ in range(3))
            part = min(subject.attend(kept, CHUNK, CHUNK) for _ in range(3))
            figures[kept][f"chunk of {CHUNK} behind {CHUNK}"] = round(whole)
            figures[kept]["of it attention"] = round(part / whole, 2)
    report = {
        "benchmark": "attention",
        "machine": machine("torch"),
        "threads": torch.get_num_threads(),
        "backend": subject.backend,
        "figures": figures,
        "failures": failures,
    }
    print(json.dumps(report, indent=2))
    write(report, asked.json)
    return len(failures) > 0


if __name__ == "__main__":
    sys.exit(main())
