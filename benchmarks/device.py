"""Time of a forward through the data plane: decode steps and a prefill, without a scheduler.

    python -m benchmarks.device [--json FILE] [--model MODEL] [--dtype auto] [--quantization auto]
        [--batch 1 16 64]

Decode steps are queued one ahead, as the loop does, behind a context of 256 tokens;
`decode_ms` is the median time from one result to the next. `prefill_ms` is one chunk
of 512 tokens into an empty row. Greedy throughout. Then the same with `--deterministic`, whose
price is the ratio of the two.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import machine, write
from drumline.contract.cache import BlockMoves
from drumline.contract.plan import Batch, Bound, Plan, TablePatch
from drumline.contract.ports import Dispatch
from drumline.contract.request import Admission, Sampling
from drumline.core.config import (
    CacheConfig,
    Config,
    Dtype,
    ModelConfig,
    Quantization,
    ScheduleConfig,
)
from drumline.device.build import build
from drumline.device.data_plane import QueuedDataPlane
from drumline.device.forward_thread import ForwardThread
from drumline.device.page import BLOCK_TOKENS

CONTEXT = 256
PREFILL = 512


class Feeder:
    """Makes the plans of rows that stand side by side, each with blocks of its own."""

    def __init__(self, plane, vocab):
        self._plane = plane
        self._random = np.random.default_rng(0)
        self._vocab = vocab
        self._columns = np.zeros(0, np.int32)
        self.rows = np.zeros(0, np.int32)
        self.length = 0

    def prefill(self, length, room):
        """Fill row 1 with `length` random tokens, in blocks that hold `room` more."""
        self.rows = np.ones(1, np.int32)
        self.length = length
        self._columns = np.arange(-(-(length + room) // BLOCK_TOKENS), dtype=np.int32)
        lengths = np.full(1, length, np.int32)
        batch = Batch(
            rows=self.rows,
            generations=np.zeros_like(self.rows),
            input_lengths=lengths,
            prefix_lengths=np.zeros_like(self.rows),
            extends=1,
            extend_ids=self._random.integers(0, self._vocab, length).astype(np.int32),
            prompt_lengths=lengths,
        )
        return self._plane.execute(self._joined(1, batch=batch), Dispatch())

    def multiply(self, batch):
        """Give rows 2 … `batch` copies of row 1's blocks: a prefill would take minutes."""
        first = self._blocks(1)
        for row in range(2, batch + 1):
            copies = (BlockMoves(0, first, self._blocks(row)),)
            self._plane.execute(self._joined(row, copies=copies), Dispatch())
        self.rows = np.arange(1, batch + 1, dtype=np.int32)

    def _blocks(self, row):
        return self._columns + np.int32(1 + (row - 1) * len(self._columns))

    def _joined(self, row, **parts):
        rid = f"r{row}"
        sampling = Sampling(top_k=1)
        self._plane.admit([Admission(rid=rid, prompt_tokens=self.length, sampling=sampling)])
        patch = TablePatch(0, np.full_like(self._columns, row), self._columns, self._blocks(row))
        return Plan(round=0, bound=(Bound(row, 0, rid),), patches=(patch,), **parts)

    def decode(self):
        """Queue one token a row; returns the ticket."""
        batch = Batch(
            rows=self.rows,
            generations=np.zeros_like(self.rows),
            input_lengths=np.ones_like(self.rows),
            prefix_lengths=np.full_like(self.rows, self.length),
        )
        self.length += 1
        return self._plane.execute(Plan(round=self.length, batch=batch), Dispatch())


def decode_ms(plane, vocab, batch, steps):
    feeder = Feeder(plane, vocab)
    plane.complete(feeder.prefill(CONTEXT, steps + 2))
    feeder.multiply(batch)
    ahead = feeder.decode()
    landed = []
    for _ in range(steps):
        ticket, ahead = ahead, feeder.decode()
        plane.complete(ticket)
        landed.append(time.perf_counter())
    plane.complete(ahead)
    return statistics.median(np.diff(landed)) * 1e3


def prefill_ms(plane, vocab, times):
    took = []
    for _ in range(times):
        start = time.perf_counter()
        plane.complete(Feeder(plane, vocab).prefill(PREFILL, 0))
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e3


def measured(asked, *, deterministic):
    """Return a device as it was built, its decode steps by batch, and its prefill, in ms."""
    thread = ForwardThread()
    largest = max(asked.batch)
    config = Config(
        model=ModelConfig(
            model=asked.model,
            dtype=asked.dtype,
            quantization=asked.quantization,
            deterministic=deterministic,
        ),
        cache=CacheConfig(max_total_tokens=largest * (CONTEXT + asked.steps + 32) + PREFILL),
        schedule=ScheduleConfig(max_num_seqs=largest),
    )
    built = build(config, thread)
    plane = QueuedDataPlane(built.handle, thread)
    vocab = built.specs.model.vocab_size
    try:
        decode = {
            batch: round(decode_ms(plane, vocab, batch, asked.steps), 2) for batch in asked.batch
        }
        prefill = round(prefill_ms(plane, vocab, 3), 1)
    finally:
        plane.shutdown()
    return built, decode, prefill


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--model")
    arguments.add_argument("--dtype", type=Dtype, default=Dtype.AUTO)
    arguments.add_argument("--quantization", type=Quantization, default=Quantization.AUTO)
    arguments.add_argument("--batch", type=int, nargs="*", default=[1, 16, 64])
    arguments.add_argument("--steps", type=int, default=40)
    asked = arguments.parse_args()

    built, decode, prefill = measured(asked, deterministic=False)
    fixed, fixed_decode, fixed_prefill = measured(asked, deterministic=True)
    report = {
        "benchmark": "device",
        "machine": machine("torch"),
        "threads": torch.get_num_threads(),
        "model": built.specs.model.name,
        "dtype": built.specs.model.dtype,
        "backend": built.specs.backend,
        "load_ms": built.startup.load_ms,
        "context": CONTEXT,
        "decode_ms": decode,
        "prefill_tokens": PREFILL,
        "prefill_ms": prefill,
        "deterministic": {
            "backend": fixed.specs.backend,
            "decode_ms": fixed_decode,
            "prefill_ms": fixed_prefill,
            "decode_price": {n: round(fixed_decode[n] / decode[n], 2) for n in decode},
            "prefill_price": round(fixed_prefill / prefill, 2),
        },
    }
    print(json.dumps(report, indent=2))
    write(report, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
