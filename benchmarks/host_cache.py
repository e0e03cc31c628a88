"""Copies between the KV pool and host memory: bandwidth, a load against computing again, rounds.

    python -m benchmarks.host_cache [--json FILE] [--model MODEL] [--rounds 9] [--threads N]

`copy` is the yardstick: one plain copy of as many bytes between two contiguous places of
the same two pools, by as many threads. `store` and `load` move the same bytes as blocks, the
way plans have it done: `neighbours` are blocks in a row on both sides, `scattered` ones
anywhere. Pools are larger than the caches, and each repetition takes other blocks, so that all
of it comes from memory.
A share is that of the yardstick in the same repetition, the median of all; in brackets the
same of processor time, which other work on the machine changes less, and by which the bar of
70 % is told to be reached or not.

`load_back` times a plan that loads a prefix of 1,024 tokens through the data plane, and one
that computes it. `steady` is the processor time of a decode round without open operations,
of an engine with host tiers beside one without.
"""

import argparse
import math
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import machine, write
from drumline.contract.cache import BlockMoves, LoadBack, WriteBack
from drumline.contract.plan import Batch, Bound, Plan, TablePatch
from drumline.contract.ports import Dispatch
from drumline.contract.request import Admission, Sampling
from drumline.core.clock import SystemClock
from drumline.core.config import CacheConfig, Config, ModelConfig, ScheduleConfig
from drumline.device.build import build
from drumline.device.data_plane import QueuedDataPlane
from drumline.device.forward_thread import ForwardThread
from drumline.device.host_cache import HostCache, HostSizes
from drumline.device.kv import KvPool
from drumline.device.kv_form import KvForm
from drumline.device.page import BLOCK_TOKENS
from drumline.replay.simulator import Simulation, small_specs

MIB = 1 << 20
SIZES_MIB = (1, 2, 4, 16, 64)
BAR = 0.7
"""The share of the yardstick that is asked for, from 1 MiB on."""
POOL_MIB = 256
PREFIX = 1024


class NoRows:
    """Rows that have no state."""

    row_words = 0

    def export_row(self, row, state):
        pass

    def import_row(self, row, state):
        pass


class Copies:
    """A KV pool of SmolLM2-135M's shape and a host pool of the same size."""

    def __init__(self, dtype, rounds, threads):
        self.dtype, self.rounds = dtype, rounds
        shape = {"layers": 30, "block_tokens": BLOCK_TOKENS, "kv_heads": 3, "head_dim": 64}
        form = KvForm(dtype)
        self.block_bytes = 2 * 30 * form.side_bytes(BLOCK_TOKENS, 3, 64)
        self.blocks = POOL_MIB * MIB // self.block_bytes
        self.kv = KvPool(**shape, blocks=self.blocks + 1, form=form, device=torch.device("cpu"))
        sizes = HostSizes(host_pages=self.blocks + 1)
        self.cache = HostCache(self.kv, NoRows(), sizes, threads, SystemClock())
        every = np.arange(1, self.blocks + 1, dtype=np.int32)
        for part in (*self.kv.keys, *self.kv.values):
            part.numbers.fill_(1)
        self.store([BlockMoves(0, every, every)])
        # Null block included, the pool's memory as it lies.
        device = self.kv.bytes.view(-1)
        assert self.cache._host is not None
        self.flat = device, self.cache._host.blocks.view(-1)
        self.random = np.random.default_rng(0)

    def store(self, moves):
        self.cache.store_ordered([WriteBack(0, tuple(moves), pinned=False)])
        self.cache.poll()

    def load(self, moves):
        load = self.cache.load([LoadBack(0, tuple(moves))])
        if load is not None:
            load.wait_all()
        self.cache.poll()

    def measure(self, mib):
        """Return GB/s of a plain copy of `mib` MiB or a bit more, and every way's share of that."""
        count = math.ceil(mib * MIB / self.block_bytes)
        size = count * self.block_bytes
        plain: list[float] = []
        shares: dict[str, list[float]] = {}
        work: dict[str, list[float]] = {}
        for _ in range(self.rounds):
            took = {name: timed(act) for name, act in self.acts(count, size)}
            wall, cpu = took.pop("copy")
            plain.append(size / wall / 1e9)
            for name, (its_wall, its_cpu) in took.items():
                shares.setdefault(name, []).append(wall / its_wall)
                work.setdefault(name, []).append(cpu / its_cpu)
        return {
            "blocks": count,
            "mib": round(size / MIB, 2),
            "copy_gbs": round(statistics.median(plain), 2),
            "share": medians(shares),
            "cpu_share": medians(work),
        }

    def acts(self, count, size):
        device, host = self.flat
        here, there = (int(self.random.integers(0, len(flat) - size)) for flat in self.flat)
        yield "copy", lambda: host[there : there + size].copy_(device[here : here + size])
        for kind, blocks in (("neighbours", self.row), ("scattered", self.anywhere)):
            for way, act in (("store", self.store), ("load", self.load)):
                moves = [BlockMoves(0, blocks(count), blocks(count))]
                yield f"{way} {kind}", lambda act=act, moves=moves: act(moves)

    def row(self, count):
        first = self.random.integers(1, self.blocks + 2 - count)
        return np.arange(first, first + count, dtype=np.int32)

    def anywhere(self, count):
        return (self.random.permutation(self.blocks)[:count] + 1).astype(np.int32)


def timed(act):
    """Return the seconds that an act takes, and those of processor in all threads."""
    began, worked = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - began, time.process_time() - worked


def medians(samples):
    return {name: round(statistics.median(all_), 2) for name, all_ in samples.items()}


def steady_us(rounds, size=64):
    """Return the microseconds of a decode round without and with host tiers, nothing open."""
    engines = {}
    for name, tiers in (
        ("without", {}),
        ("with", {"num_host_pages": 20_001, "num_snapshot_pages": 4_001,
                  "max_retracted_requests": size}),
    ):  # fmt: skip
        engines[name] = Simulation(
            small_specs(
                num_pages=20_001, max_rows=size, max_scheduled_tokens=2048, max_model_len=4096,
                eos_token_ids=(), **tiers,
            ),
            depth=1,
        )  # fmt: skip
        for n in range(size):
            engines[name].submit(f"r{n}", [n + 1, *range(1, 30)])
        engines[name].run(64)
    took: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            began = time.thread_time()
            engine.run(16)
            took[name].append((time.thread_time() - began) / 16 * 1e6)
    if engines["with"].loop._cache_ops.open:
        raise SystemExit("an operation is open in a round that should be steady")
    ratios = [mine / plain for mine, plain in zip(took["with"], took["without"], strict=True)]
    return {
        "rows": size,
        "without_us": round(statistics.median(took["without"]), 1),
        "with_us": round(statistics.median(took["with"]), 1),
        "ratio": round(statistics.median(ratios), 3),
    }


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
            ticket = plane.execute(plan, Dispatch())
            assert ticket is not None
            plane.complete(ticket)
            prefills.append(time.perf_counter() - began)
        moves = (BlockMoves(0, blocks, blocks[::-1].copy()),)
        store = WriteBack(0, moves, pinned=False)
        plane.execute(Plan(round=2, cache_ops=(store,)), Dispatch())
        thread.call(lambda: None)
        back = (BlockMoves(0, blocks[::-1].copy(), blocks),)
        for n in range(1, 5 * repeats):
            began = time.perf_counter()
            # Without a batch of its own, a plan ends behind its load.
            plane.execute(Plan(round=3, cache_ops=(LoadBack(n, back),)), Dispatch())
            thread.call(lambda: None)
            loads.append(time.perf_counter() - began)
            plane.poll_cache_acks()
    finally:
        plane.shutdown()
    return {
        "model": built.specs.model.name,
        "dtype": built.specs.model.dtype,
        "tokens": PREFIX,
        "load_ms": round(statistics.median(loads) * 1e3, 2),
        "prefill_ms": round(statistics.median(prefills) * 1e3, 1),
        "times_quicker": round(statistics.median(prefills) / statistics.median(loads), 1),
    }


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--model")
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = arguments.parse_args()
    torch.set_num_threads(asked.threads)
    report = {
        "benchmark": "host_cache",
        "machine": machine("torch"),
        "threads": asked.threads,
        "copies": {},
    }
    ways = [f"{way} {kind}" for kind in ("neighbours", "scattered") for way in ("store", "load")]
    print(f"{'dtype':9} {'MiB':>6} {'copy':>11}  " + "  ".join(f"{way:>16}" for way in ways))
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        copies = Copies(dtype, asked.rounds, asked.threads)
        found = report["copies"][name] = [copies.measure(mib) for mib in SIZES_MIB]
        for row in found:
            shares = "  ".join(
                f"{row['share'][way]:9.0%} ({row['cpu_share'][way]:4.0%})" for way in ways
            )
            row["below"] = [way for way in ways if row["cpu_share"][way] < BAR]
            print(f"{name:9} {row['mib']:6.1f} {row['copy_gbs']:6.1f} GB/s  {shares}")
        copies.cache.stop()
    below = [
        f"{way} of {row['mib']} MiB in {name}"
        for name, rows in report["copies"].items()
        for row in rows
        for way in row["below"]
    ]
    print(f"less than {BAR:.0%} of the yardstick, by processor time: {', '.join(below) or 'none'}")
    still = report["steady"] = steady_us(4 * asked.rounds)
    print(
        f"a steady round of {still['rows']} rows takes {still['with_us']} us of processor with "
        f"host tiers, {still['without_us']} us without: {still['ratio']} times as long"
    )
    back = report["load_back"] = load_back_ms(asked.model, 5)
    print(
        f"{back['model']} in {back['dtype']}: {PREFIX} tokens load in {back['load_ms']} ms and "
        f"are computed in {back['prefill_ms']} ms, {back['times_quicker']} times as long"
    )
    write(report, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
