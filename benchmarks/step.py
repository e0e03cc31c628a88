"""Time of a model's forward by how it is computed: weights as stored, or floats of some type.

    python -m benchmarks.step [--json FILE] [--model MODEL] [--batch 1 16 64] [--context 256]
        [--threads N] [--ways stored float32 bfloat16 "torch float32" "torch bfloat16"]

All are built in one process and measured in turn, `--rounds` times, so that they meet the same
machine; figures are medians, in ms, of decode steps behind `--context` tokens and of a prompt of
512. `wall` is the time a step takes, `cpu` what its threads compute, waiting for each other by
spinning included: with one thread it is what a busy machine changes least. `torch` has linear
layers by torch, one by one, and attention by the kernels. The sampler is not in it.

`products` are square matrix products by torch, measured among the others: what this machine makes
of floats at best. `of_ceiling` is the prompt's part of that, by processor time: its products and
attention by float32's, or where weights are bfloat16 and the processor multiplies it, by that one.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from msgspec import structs

from benchmarks.report import machine, write
from drumline.core.config import Dtype, ModelConfig, Quantization
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

PROMPT = 512
WAYS = ("stored", "float32", "bfloat16", "torch float32", "torch bfloat16")
SQUARE = 1024
CEILINGS = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Times = dict[str, dict[str, list[tuple[float, float]]]]
"""Of a case and a way: ms of time and of processor time of each round."""


class Side:
    """A model with a pool, and rows whose contexts hold whatever the pool does."""

    def __init__(self, asked, way):
        checkpoint = open_checkpoint(find_model(asked.model))
        model = checkpoint.config
        settings = ModelConfig(model=asked.model, quantization=Quantization.AUTO)
        if way != "stored":
            dtype = Dtype(way.split()[-1])
            settings = structs.replace(settings, quantization=Quantization.NONE, dtype=dtype)
        how = chosen(settings, model, 1)
        if way.startswith("torch"):
            layers = structs.replace(how.backend, name=way, one_call=False)
            how = structs.replace(how, backend=layers)
        cpu = torch.device("cpu")
        start = time.perf_counter()
        loader = WeightLoader(
            model,
            how.backend,
            how.dtype,
            cpu,
            Alone(),
            how.apportioned,
            available_bytes,
            shard_of(model, 0, 1),
        )
        self.decoder = loader.load(checkpoint).decoder
        self.load_ms = (time.perf_counter() - start) * 1e3
        self.backend = how.backend.name
        self.prompt_flop = prompt_flop(model)
        rows, columns = max(*asked.batch, 1), -(-max(asked.context + 1, PROMPT) // BLOCK_TOKENS)
        pool = KvPool(
            layers=model.layers,
            blocks=rows * columns + 1,
            block_tokens=BLOCK_TOKENS,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            form=how.kv_form,
            device=cpu,
        )
        self.attention = how.backend.attention(pool)
        self.shape = pool.shape
        self.table = BlockTable(rows + 1, columns)
        for row in range(1, rows + 1):
            blocks = np.arange(columns, dtype=np.int32) + (row - 1) * columns + 1
            at = np.arange(columns, dtype=np.int32)
            self.table.patch(np.full(columns, row, np.int32), at, blocks)
        self.ids = torch.arange(PROMPT * 97, dtype=torch.int64) * 31 % model.vocab_size

    @torch.inference_mode()
    def feed(self, rows, length, prefix):
        """Return a forward's time and its processor time, in ms, with a row of logits for each."""
        batch = AttentionBatch(
            self.table,
            np.arange(1, rows + 1, dtype=np.int32),
            np.full(rows, length, np.int32),
            np.full(rows, prefix, np.int32),
            self.shape,
        )
        last = torch.arange(rows) * length + length - 1
        wall, cpu = time.perf_counter(), time.process_time()
        self.decoder.forward(self.ids[: rows * length], batch, self.attention, last)
        return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def prompt_flop(model):
    """Return the multiplications and additions of a prompt in a model's layers."""
    attended = model.heads * model.head_dim
    weights = model.hidden_size * (
        2 * attended + 2 * model.kv_heads * model.head_dim + 3 * model.intermediate_size
    )
    pairs = PROMPT * (PROMPT + 1) // 2
    return 2 * model.layers * (PROMPT * weights + 2 * pairs * attended)


class Square:
    """A matrix product that keeps a processor's multipliers as busy as any does."""

    flop = 2 * SQUARE**3

    def __init__(self, dtype):
        self.sides = [torch.rand(SQUARE, SQUARE).to(dtype) for _ in range(2)]

    @torch.inference_mode()
    def gflops(self):
        """Return what one product reaches, in 1e9 operations a second of processor time."""
        cpu = time.process_time()
        torch.mm(*self.sides)
        return self.flop / (time.process_time() - cpu) / 1e9


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--model")
    arguments.add_argument("--batch", type=int, nargs="*", default=[1, 16, 64])
    arguments.add_argument("--context", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--threads", type=int)
    arguments.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    asked = arguments.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    sides = {way: Side(asked, way) for way in asked.ways}
    cases = {f"decode {rows}": (rows, 1, asked.context) for rows in asked.batch}
    cases[f"prompt {PROMPT}"] = (1, PROMPT, 0)
    took: Times = {name: {way: [] for way in sides} for name in cases}
    squares = {name: Square(dtype) for name, dtype in CEILINGS.items()}
    reached: dict[str, list[float]] = {name: [] for name in squares}
    for turn in range(asked.rounds + 1):
        for name, square in squares.items():
            gflops = square.gflops()
            if turn:
                reached[name].append(gflops)
        for name, case in cases.items():
            for way, side in sides.items():
                time_of = side.feed(*case)
                if turn:  # the first one grows memory
                    took[name][way].append(time_of)
    figures = {
        name: {
            way: {
                what: round(statistics.median(each), 2)
                for what, each in zip(("wall", "cpu"), zip(*times, strict=True), strict=True)
            }
            for way, times in ways.items()
        }
        for name, ways in took.items()
    }
    ceilings = {name: round(statistics.median(each), 1) for name, each in reached.items()}
    of_ceiling = {
        way: round(
            side.prompt_flop
            / (figures[f"prompt {PROMPT}"][way]["cpu"] * 1e6)
            / (max(ceilings.values()) if way.endswith("bfloat16") else ceilings["float32"]),
            2,
        )
        for way, side in sides.items()
    }
    report = {
        "benchmark": "step",
        "machine": machine("torch"),
        "threads": torch.get_num_threads(),
        "model": asked.model or "embedded",
        "backends": {way: side.backend for way, side in sides.items()},
        "load_ms": {way: round(side.load_ms) for way, side in sides.items()},
        "context": asked.context,
        "figures": figures,
        "products": {name: {"gflops": value} for name, value in ceilings.items()},
        "of_ceiling": of_ceiling,
    }
    print(json.dumps(report, indent=2))
    write(report, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
