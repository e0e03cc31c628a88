"""Copies between the KV pool and host memory: bandwidth, and a load against computing again.

    python benchmarks/host_cache.py [--json FILE] [--model MODEL] [--rounds 15]

`copy_gbs` is the yardstick: one plain copy of as many bytes between two contiguous places
of the same two pools. `store` and `load` move the same bytes as blocks, whose keys and
values of every layer lie apart on one side: `neighbours` are blocks in a row on both sides,
`scattered` ones anywhere. Pools are larger than the caches, and each repetition takes other
blocks, so that all of it comes from memory. Best of the rounds; `share` is of the yardstick.

`load_back` times a plan that loads a prefix of 1,024 tokens through the data plane, and one
that computes it.
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch

from drumline.contract.arena import ArenaTier
from drumline.contract.cache import BlockMoves, LoadBack, WriteBack
from drumline.contract.plan import Batch, Bound, Plan, TablePatch
from drumline.contract.ports import Dispatch
from drumline.contract.request import Admission, Sampling
from drumline.core.config import CacheConfig, Config, ModelConfig, ScheduleConfig
from drumline.device.build import build
from drumline.device.data_plane import QueuedDataPlane
from drumline.device.forward_thread import ForwardThread
from drumline.device.host_cache import HostPool
from drumline.device.kv import BLOCK_TOKENS, KvPool

MIB = 1 << 20
SIZES_MIB = (1, 4, 16, 64)
POOL_MIB = 256
PREFIX = 1024


class Copies:
    """A KV pool of SmolLM2-135M's shape and a host pool of the same size."""

    def __init__(self, dtype, rounds):
        self.dtype, self.rounds = dtype, rounds
        shape = {"layers": 30, "block_tokens": BLOCK_TOKENS, "kv_heads": 3, "head_dim": 64}
        self.block_bytes = 2 * 30 * BLOCK_TOKENS * 3 * 64 * dtype.itemsize
        self.blocks = POOL_MIB * MIB // self.block_bytes
        self.kv = KvPool(**shape, blocks=self.blocks + 1, dtype=dtype, device=torch.device("cpu"))
        self.host = HostPool(self.kv, self.blocks, ArenaTier.HOST)
        every = np.arange(1, self.blocks + 1, dtype=np.int32)
        for part in (*self.kv.keys, *self.kv.values):
            part.fill_(1)
        self.host.store(self.kv, [BlockMoves(0, every, every)])
        self.flat = (self.kv._fields.view(-1), self.host._blocks.view(-1))
        self.random = np.random.default_rng(0)

    def measure(self, mib):
        """Return GB/s of every way to copy about `mib` MiB."""
        count = max(1, mib * MIB // self.block_bytes)
        size = count * self.block_bytes
        best = {}
        for _ in range(self.rounds):
            for name, act in self.acts(count, size):
                began = time.perf_counter()
                act()
                took = time.perf_counter() - began
                best[name] = min(best.get(name, took), took)
        return {"blocks": count, "mib": round(size / MIB, 2)} | {
            name: round(size / took / 1e9, 2) for name, took in best.items()
        }

    def acts(self, count, size):
        device, host = self.flat
        here, there = (int(self.random.integers(0, len(flat) - size)) for flat in self.flat)
        yield "copy", lambda: host[there : there + size].copy_(device[here : here + size])
        for kind, blocks in (("neighbours", self.row), ("scattered", self.anywhere)):
            store = [BlockMoves(0, blocks(count), blocks(count))]
            load = [BlockMoves(0, blocks(count), blocks(count))]
            yield f"store {kind}", lambda store=store: self.host.store(self.kv, store)
            yield f"load {kind}", lambda load=load: self.host.load(self.kv, load)

    def row(self, count):
        first = self.random.integers(1, self.blocks + 2 - count)
        return np.arange(first, first + count, dtype=np.int32)

    def anywhere(self, count):
        return (self.random.permutation(self.blocks)[:count] + 1).astype(np.int32)


def load_back_ms(model, repeats):
    """Return the milliseconds of a plan that loads a prefix, and of one that computes it."""
    thread = ForwardThread()
    config = Config(
        model=ModelConfig(model=model),
        cache=CacheConfig(max_total_tokens=4 * PREFIX, kvstore=True, kvstore_ratio=1.0),
        schedule=ScheduleConfig(max_num_seqs=2),
    )
    built = build(config, thread)
    plane = QueuedDataPlane(built.handle, thread)
    blocks = np.arange(1, PREFIX // BLOCK_TOKENS + 1, dtype=np.int32)
    columns = np.arange(len(blocks), dtype=np.int32)
    ids = np.random.default_rng(0).integers(0, built.specs.model.vocab_size, PREFIX)
    one, length = np.ones(1, np.int32), np.full(1, PREFIX, np.int32)
    batch = Batch(
        rows=one,
        generations=one,
        input_lengths=length,
        prefix_lengths=np.zeros(1, np.int32),
        extends=1,
        extend_ids=ids.astype(np.int32),
        prompt_lengths=length,
    )
    patch = TablePatch(0, np.ones_like(blocks), columns, blocks)
    plane.admit([Admission(rid="a", prompt_tokens=PREFIX, sampling=Sampling(top_k=1))])
    prefills, loads = [], []
    try:
        for _ in range(repeats):
            began = time.perf_counter()
            plan = Plan(round=1, batch=batch, bound=(Bound(1, 1, "a"),), patches=(patch,))
            plane.complete(plane.execute(plan, Dispatch()))
            prefills.append(time.perf_counter() - began)
        moves = (BlockMoves(0, blocks, blocks[::-1].copy()),)
        store = WriteBack(0, moves, pinned=False)
        plane.execute(Plan(round=2, cache_ops=(store,)), Dispatch())
        thread.call(lambda: None)
        back = (BlockMoves(0, blocks[::-1].copy(), blocks),)
        for n in range(1, 5 * repeats):
            began = time.perf_counter()
            plane.execute(Plan(round=3, cache_ops=(LoadBack(n, back),)), Dispatch())
            thread.call(lambda: None)
            loads.append(time.perf_counter() - began)
    finally:
        plane.shutdown()
    return {
        "model": built.specs.model.name,
        "dtype": built.specs.model.dtype,
        "tokens": PREFIX,
        "load_ms": round(min(loads) * 1e3, 2),
        "prefill_ms": round(min(prefills) * 1e3, 1),
        "times_quicker": round(min(prefills) / min(loads), 1),
    }


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--model")
    arguments.add_argument("--rounds", type=int, default=15)
    asked = arguments.parse_args()
    report = {
        "benchmark": "host_cache",
        "machine": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "copies_gbs": {},
    }
    ways = [f"{way} {kind}" for kind in ("neighbours", "scattered") for way in ("store", "load")]
    print(f"{'dtype':9} {'MiB':>6} {'copy':>6}  " + "  ".join(f"{way:>17}" for way in ways))
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        copies = Copies(dtype, asked.rounds)
        found = report["copies_gbs"][name] = [copies.measure(mib) for mib in SIZES_MIB]
        for row in found:
            shares = [f"{row[way]:6.1f} GB/s {row[way] / row['copy']:4.0%}" for way in ways]
            row["share"] = {way: round(row[way] / row["copy"], 2) for way in ways}
            print(f"{name:9} {row['mib']:6.1f} {row['copy']:6.1f}  " + "  ".join(shares))
    back = report["load_back"] = load_back_ms(asked.model, 2)
    print(
        f"{back['model']} in {back['dtype']}: {PREFIX} tokens load in {back['load_ms']} ms and "
        f"are computed in {back['prefill_ms']} ms, {back['times_quicker']} times as long"
    )
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
