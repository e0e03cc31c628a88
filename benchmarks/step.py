"""Time of a model's forward by back end: weights as they are stored beside floats of them.

    python benchmarks/step.py [--json FILE] [--model MODEL] [--batch 1 16 64] [--context 256]
        [--threads N]

Both are built in one process and measured in turn, `--rounds` times, so that they meet the same
machine; figures are medians, in ms, of decode steps behind `--context` tokens and of a prompt of
512. `wall` is the time a step takes, `cpu` what its threads compute, waiting for each other by
spinning included: with one thread it is what a busy machine changes least. The sampler is not
in it.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from drumline.core.config import ModelConfig, Quantization
from drumline.core.model_files import find_model
from drumline.device.attention import AttentionBatch
from drumline.device.backends import chosen
from drumline.device.budget import available_bytes
from drumline.device.kv import BlockTable, KvPool
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.page import BLOCK_TOKENS
from drumline.device.parallel import Alone
from drumline.device.weight_loader import WeightLoader

PROMPT = 512
WAYS = (Quantization.NONE, Quantization.AUTO)


class Side:
    """A model with a pool, and rows whose contexts hold whatever the pool does."""

    def __init__(self, asked, quantization):
        checkpoint = open_checkpoint(find_model(asked.model))
        model = checkpoint.config
        how = chosen(ModelConfig(model=asked.model, quantization=quantization), model, 1)
        cpu = torch.device("cpu")
        start = time.perf_counter()
        loader = WeightLoader(
            model, how.backend, how.dtype, cpu, Alone(), how.apportioned, available_bytes
        )
        self.decoder = loader.load(checkpoint).decoder
        self.load_ms = (time.perf_counter() - start) * 1e3
        self.backend = how.backend.name
        rows, columns = max(*asked.batch, 1), -(-max(asked.context + 1, PROMPT) // BLOCK_TOKENS)
        pool = KvPool(
            layers=model.layers,
            blocks=rows * columns + 1,
            block_tokens=BLOCK_TOKENS,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            dtype=how.dtype,
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


def processor():
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--model")
    arguments.add_argument("--batch", type=int, nargs="*", default=[1, 16, 64])
    arguments.add_argument("--context", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--threads", type=int)
    asked = arguments.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    sides = [Side(asked, way) for way in WAYS]
    cases = {f"decode {rows}": (rows, 1, asked.context) for rows in asked.batch}
    cases[f"prompt {PROMPT}"] = (1, PROMPT, 0)
    took = {name: [[] for _ in sides] for name in cases}
    for turn in range(asked.rounds + 1):
        for name, case in cases.items():
            for side, times in zip(sides, took[name], strict=True):
                time_of = side.feed(*case)
                if turn:  # the first one grows memory
                    times.append(time_of)
    figures = {}
    for name, both in took.items():
        wall, cpu = ([statistics.median(t[i] for t in times) for times in both] for i in (0, 1))
        figures[name] = {
            "floats": {"wall": round(wall[0], 2), "cpu": round(cpu[0], 2)},
            "stored": {"wall": round(wall[1], 2), "cpu": round(cpu[1], 2)},
            "times quicker": {
                "wall": round(wall[0] / wall[1], 2),
                "cpu": round(cpu[0] / cpu[1], 2),
            },
        }
    report = {
        "benchmark": "step",
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "model": asked.model or "embedded",
        "backends": {"floats": sides[0].backend, "stored": sides[1].backend},
        "load_ms": {"floats": round(sides[0].load_ms), "stored": round(sides[1].load_ms)},
        "context": asked.context,
        "figures": figures,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
