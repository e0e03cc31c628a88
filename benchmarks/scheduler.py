"""What a scheduler round costs, in CPU microseconds of the thread that plans.

    python -m benchmarks.scheduler [--quick] [--json FILE]
    python -m benchmarks.scheduler --flat-memory ROUNDS

Every figure is a median of `time.thread_time_ns` over the rounds measured, unless its
column says p99. Where the published C++ scheduler (`tokenspeed-scheduler`, CPython 3.11)
is installed, it does the same work in the same process, in turns with ours; `ratio` is its
time by ours. `bar` is what a figure should be at most on the machine the bars were set on;
`here`, what that is on this machine and in this hour: the bar times what the peer takes now,
by what it took there. The peer is the C++ scheduler, of hashing a bare loop over hashlib.
`holds` says it of each of them, and of the ratio where a bar is set for it.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import machine, write
from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.core.hashing import page_digests
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.events import Finished, RequestSpec, Results
from drumline.scheduler.scheduler import Scheduler

try:
    import tokenspeed_scheduler as cpp
except ImportError:
    cpp = None

Line = dict[str, Any]
"""One row of a table: what it is about comes first."""
BARS: dict[str, dict[Any, Any]] = {
    "steady decode, one group": {
        1: (25, None),
        16: (None, 1),
        256: (60, 8),
        1024: (150, 25),
    },
    "steady decode, full and window group": {256: (100, None), 1024: (250, None)},
    "admission with a cached prefix": {2048: (60, None), 32_768: (400, None)},
    "hashing a prompt's pages, off the loop": {2048: (60, None), 32_768: (1000, None)},
    "churn": {"0.1": (None, 1), "0.25": (None, 1)},
}
"""Of each table's rows: microseconds, and times faster than the C++ scheduler."""

PEER_THERE: dict[str, dict[int, float]] = {
    "steady decode, one group": {1: 9.3, 16: 38.9, 64: 140, 256: 579, 1024: 5231},
    "admission with a cached prefix": {2048: 76, 32_768: 1771},
    "hashing a prompt's pages, off the loop": {2048: 58, 32_768: 886},
}
"""What the peer took on the machine the bars were set on, in microseconds."""

TURNS = 10

GROWN = 1.3
"""How much more a round may cost in a larger pool or later on; the rest is noise."""

now = time.thread_time_ns
PAGE = 16


def median(samples: list[int]) -> float:
    return statistics.median(samples) / 1e3


def config(rows: int, pages: int, window: int | None = None, **changes) -> SchedulerConfig:
    groups = [CacheGroup(group_id="full", block_tokens=PAGE)]
    if window:
        groups.append(
            CacheGroup(
                group_id="window",
                kind=AttentionKind.SLIDING_WINDOW,
                block_tokens=PAGE,
                window_tokens=window,
            )
        )
    return SchedulerConfig(
        groups=tuple(groups),
        num_pages=pages,
        prefix_granularity=PAGE,
        max_rows=rows,
        max_scheduled_tokens=1 << 20,
        max_model_tokens=40_000,
        **changes,
    )


Round = Callable[[], tuple[int, ...]]
"""Does a round and returns what its parts took, in nanoseconds; after those, facts of it."""


def in_turns(*works: tuple[Round, int]) -> list[list[tuple[int, ...]]]:
    """Do each work as often as it says, in turns: what disturbs one disturbs all.

    Returns what the works returned. What lives now is nothing for the collector to look at,
    as in a rank that serves.
    """
    gc.collect()
    gc.freeze()
    samples: list[list[tuple[int, ...]]] = [[] for _ in works]
    for turn in range(TURNS):
        for (work, times), mine in zip(works, samples, strict=True):
            mine += [work() for _ in range(times * turn // TURNS, times * (turn + 1) // TURNS)]
    gc.unfreeze()
    return samples


class OursSteady:
    """Plan and commit of `rows` decodes, prompts of about 512 tokens, hashing on."""

    def __init__(self, rows: int, window: int | None = None, pages: int = 120_000) -> None:
        self._scheduler = Scheduler(config(rows, pages, window))
        rng = np.random.default_rng(0)
        self._scheduler.submit(
            [
                RequestSpec(
                    rid=f"r{at}",
                    tokens=rng.integers(0, 32_000, 512 + at % PAGE).astype(np.int32),
                )
                for at in range(rows)
            ]
        )
        self._ones = np.ones(rows, np.int32)
        for _ in range(20):
            self.round()

    def round(self) -> tuple[int, int]:
        """Return what plan and commit took."""
        start = now()
        plan = self._scheduler.plan()
        planned = now()
        batch, ones = plan.batch, self._ones
        assert batch is not None
        results = Results(rows=batch.rows, generations=batch.generations, counts=ones, tokens=ones)
        before = now()
        self._scheduler.advance([results])
        return planned - start, now() - before


def cpp_config(rows: int, pages: int, window: int | None = None):
    cfg = cpp.SchedulerConfig()
    cfg.prefix_granularity = PAGE
    cfg.num_device_pages = pages
    cfg.num_host_pages = 0
    cfg.num_snapshot_pages = 1
    cfg.max_scheduled_tokens = 1 << 20
    cfg.max_batch_size = rows
    groups = [cpp.CacheGroupConfig("full", PAGE, pages - 1, cpp.AttnKind.Full)]
    if window:
        groups.append(
            cpp.CacheGroupConfig(
                "window", PAGE, pages - 1, cpp.AttnKind.SlidingWindow, sliding_window_tokens=window
            )
        )
    cfg.cache_groups = groups
    return cfg


def cpp_read(plan: Any) -> list[str]:
    """Look at what a caller needs of a plan; returns the request ids."""
    batch = plan.forward[0]
    rids: list[str] = batch.request_ids
    _ = (batch.request_pool_indices, batch.input_lengths, batch.block_tables_arrays())
    _ = (plan.pages_to_zero_arrays(), plan.pages_to_copy_arrays(), plan.cache, plan.aborts)
    return rids


def cpp_advance(scheduler, rids: list[str]) -> None:
    event = cpp.ExecutionEvent()
    for rid in rids:
        event.add_event(cpp_result(rid))
    scheduler.advance(event)


def cpp_result(rid: str):
    result = cpp.ForwardEvent.ExtendResult()
    result.request_id = rid
    result.tokens = [1]
    return result


def cpp_spec(rid: str, tokens: list[int], max_new_tokens: int = 0):
    spec = cpp.RequestSpec()
    spec.request_id = rid
    spec.tokens = tokens
    spec.max_new_tokens = max_new_tokens
    return spec


class CppSteady:
    """The same of the C++ scheduler."""

    def __init__(self, rows: int, window: int | None = None) -> None:
        self._scheduler = cpp.Scheduler(cpp_config(rows, 120_000, window))
        rng = np.random.default_rng(0)
        self._scheduler.submit_requests(
            [
                cpp_spec(f"r{at}", rng.integers(0, 32_000, 512 + at % PAGE).tolist())
                for at in range(rows)
            ]
        )
        for _ in range(20):
            self.round()

    def round(self) -> tuple[int]:
        """Return what plan, a look at it and commit took."""
        start = now()
        rids = cpp_read(self._scheduler.next_execution_plan())
        cpp_advance(self._scheduler, rids)
        return (now() - start,)


def steady(quick: bool, window: int | None) -> list[Line]:
    lines = []
    for rows in (1, 16, 64, 256, 1024):
        rounds = 100 if quick else 400
        works: list[tuple[Round, int]] = [(OursSteady(rows, window).round, rounds)]
        if cpp is not None:
            works.append((CppSteady(rows, window).round, min(rounds, 20_000 // rows + 20)))
        ours, *theirs = in_turns(*works)
        plans, commits = map(list, zip(*ours, strict=True))
        line: Line = {"rows": rows, "plan": median(plans), "commit": median(commits)}
        line["total"] = median([sum(parts) for parts in ours])
        if theirs:
            line["cpp"] = median([sum(parts) for parts in theirs[0]])
        lines.append(line)
    return lines


class OursHit:
    """Submission and admission of a prompt of which `length` tokens are cached."""

    def __init__(self, length: int) -> None:
        self._scheduler = Scheduler(config(8, 40_000))
        self._rng = np.random.default_rng(0)
        self._base = self._rng.integers(0, 32_000, length).astype(np.int32)
        self._made = 0
        for _ in range(2):
            self.round()

    def round(self) -> tuple[int, int]:
        """Return what submit and plan took."""
        self._made += 1
        own = self._rng.integers(0, 32_000, 16).astype(np.int32)
        tokens = np.concatenate((self._base, own))
        digests, rid = page_digests(tokens, PAGE), f"r{self._made}"
        start = now()
        self._scheduler.submit([RequestSpec(rid=rid, tokens=tokens, page_digests=digests)])
        submitted = now()
        plan = self._scheduler.plan()
        end = now()
        assert plan.batch is not None
        if self._made > 2:
            assert plan.batch.prefix_lengths.tolist() == [len(self._base)]
        _commit(self._scheduler, plan.batch)
        self._scheduler.advance([Finished(rid)])
        self._scheduler.plan()
        return submitted - start, end - submitted


def _commit(scheduler: Scheduler, batch) -> None:
    ones = np.ones(batch.size, np.int32)
    scheduler.advance(
        [Results(rows=batch.rows, generations=batch.generations, counts=ones, tokens=ones)]
    )


class CppHit:
    """The same of the C++ scheduler, which hashes in its own calls."""

    def __init__(self, length: int) -> None:
        self._scheduler = cpp.Scheduler(cpp_config(8, 40_000))
        self._rng = np.random.default_rng(0)
        self._base = self._rng.integers(0, 32_000, length)
        self._made = 0
        for _ in range(2):
            self.round()

    def round(self) -> tuple[int]:
        """Return what submit, plan and a look at it took."""
        self._made += 1
        rid, own = f"r{self._made}", self._rng.integers(0, 32_000, 16)
        spec = cpp_spec(rid, np.concatenate((self._base, own)).tolist())
        start = now()
        self._scheduler.submit_requests([spec])
        plan = self._scheduler.next_execution_plan()
        cpp_read(plan)
        took = now() - start
        cpp_advance(self._scheduler, [rid])
        event = cpp.ExecutionEvent()
        finish = cpp.ForwardEvent.Finish()
        finish.request_id = rid
        event.add_event(finish)
        self._scheduler.advance(event)
        self._scheduler.next_execution_plan()
        return (took,)


def hits(quick: bool) -> list[Line]:
    lines = []
    for length in (2048, 32_768):
        repeats = 10 if quick else 40
        works: list[tuple[Round, int]] = [(OursHit(length).round, repeats)]
        if cpp is not None:
            works.append((CppHit(length).round, repeats))
        ours, *theirs = in_turns(*works)
        submits, plans = map(list, zip(*ours, strict=True))
        line: Line = {"hit": length, "submit": median(submits), "plan": median(plans)}
        line["total"] = median([sum(parts) for parts in ours])
        if theirs:
            line["cpp"] = median([sum(parts) for parts in theirs[0]])
        lines.append(line)
    return lines


def hashing(quick: bool) -> list[Line]:
    lines = []
    for length in (2048, 32_768):
        tokens = np.random.default_rng(0).integers(0, 32_000, length).astype(np.int32)
        repeats = 20 if quick else 100

        def ours(tokens: np.ndarray = tokens) -> tuple[int]:
            start = now()
            page_digests(tokens, PAGE)
            return (now() - start,)

        def bare(tokens: np.ndarray = tokens) -> tuple[int]:
            start = now()
            prior, pages = b"", memoryview(tokens.tobytes())
            for at in range(0, len(pages), 4 * PAGE):
                head = len(prior).to_bytes(4, "little")
                count = PAGE.to_bytes(4, "little")
                page = b"".join((head, prior, count, pages[at : at + 4 * PAGE]))
                prior = sha256(page).digest()
            return (now() - start,)

        mine, loop = in_turns((ours, repeats), (bare, repeats))
        line: Line = {"tokens": length, "total": median([one for (one,) in mine])}
        line["bare loop"] = median([one for (one,) in loop])
        lines.append(line)
    return lines


class Traffic:
    """Poisson arrivals, the same for whoever asks: prompts and answers of 128 to 2048 tokens.

    Half of a prompt is one of 64 heads. It starts with the requests that would be running.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._rng = np.random.default_rng(0)
        self._heads = self._rng.integers(0, 32_000, (64, 1024)).astype(np.int32)
        self._made = 0
        self._next = int(rate * 1088)

    def arrivals(self) -> list[tuple[str, np.ndarray, int]]:
        """Return the next round's requests: id, prompt, tokens of the answer."""
        first = not self._made
        requests = [self._request(first) for _ in range(self._next)]
        self._next = int(self._rng.poisson(self._rate))
        return requests

    def _request(self, first: bool) -> tuple[str, np.ndarray, int]:
        rng = self._rng
        length, answer = rng.integers(128, 2049, 2).tolist()
        own = rng.integers(0, 32_000, length - length // 2).astype(np.int32)
        prompt = np.concatenate((self._heads[rng.integers(64)][: length // 2], own))
        if first:
            answer = int(rng.integers(1, answer + 1))
        self._made += 1
        return f"r{self._made}", prompt, answer


class OursUnderChurn:
    """One round after another of ours; pages are hashed where prompts are taken in."""

    def __init__(self, rate: float, rows: int = 256, pages: int = 40_000) -> None:
        self._traffic = Traffic(rate)
        self._scheduler = Scheduler(config(rows, pages))
        self._rids = [""] * (rows + 1)
        self._left = np.zeros(rows + 1, np.int64)
        self._answers: dict[str, int] = {}

    def round(self) -> tuple[int, int]:
        """Return what the round took, and how many rows it had."""
        specs = []
        for rid, prompt, answer in self._traffic.arrivals():
            self._answers[rid] = answer
            digests = page_digests(prompt, PAGE)
            specs.append(RequestSpec(rid=rid, tokens=prompt, page_digests=digests))
        start = now()
        if specs:
            self._scheduler.submit(specs)
        plan = self._scheduler.plan()
        took = now() - start
        for bound in plan.bound:
            self._rids[bound.row] = bound.rid
            self._left[bound.row] = self._answers.pop(bound.rid)
        batch = plan.batch
        if batch is None:
            return took, 0
        ones = np.ones(batch.size, np.int32)
        self._left[batch.rows] -= 1
        events: list[Results | Finished] = [
            Results(rows=batch.rows, generations=batch.generations, counts=ones, tokens=ones)
        ]
        ended = batch.rows[self._left[batch.rows] == 0]
        events += [Finished(self._rids[row]) for row in ended.tolist()]
        start = now()
        self._scheduler.advance(events)
        return took + now() - start, batch.size


class CppUnderChurn:
    """The same rounds of the C++ scheduler, which hashes in its own calls."""

    def __init__(self, rate: float, rows: int = 256, pages: int = 40_000) -> None:
        self._traffic = Traffic(rate)
        cfg = cpp_config(rows, pages)
        cfg.enable_mixed_prefill_decode = True
        self._scheduler = cpp.Scheduler(cfg)
        self._left: dict[str, int] = {}

    def round(self) -> tuple[int, int]:
        """Return what the round took, and how many rows it had."""
        specs = []
        for rid, prompt, answer in self._traffic.arrivals():
            self._left[rid] = answer
            specs.append(cpp_spec(rid, prompt.tolist()))
        start = now()
        if specs:
            self._scheduler.submit_requests(specs)
        plan = self._scheduler.next_execution_plan()
        rids = cpp_read(plan) if plan.forward else []
        took = now() - start
        ended = []
        for rid in rids:
            self._left[rid] -= 1
            if not self._left[rid]:
                ended.append(rid)
        start = now()
        event = cpp.ExecutionEvent()
        for rid in rids:
            event.add_event(cpp_result(rid))
        for rid in ended:
            finish = cpp.ForwardEvent.Finish()
            finish.request_id = rid
            event.add_event(finish)
        self._scheduler.advance(event)
        return took + now() - start, len(rids)


def churn(quick: bool) -> list[Line]:
    lines = []
    rounds = 300 if quick else 1500
    for rate in (0.10, 0.25):
        line: Line = {"rate": str(rate)}
        drivers = {"total": OursUnderChurn(rate).round}
        if cpp is not None:
            drivers["cpp"] = CppUnderChurn(rate).round
        for drive in drivers.values():
            for _ in range(50):
                drive()
        samples = in_turns(*[(drive, rounds) for drive in drivers.values()])
        for name, mine in zip(drivers, samples, strict=True):
            took, sizes = map(list, zip(*mine, strict=True))
            line[name] = median(took)
            line[f"{name} p99"] = float(np.percentile(took, 99)) / 1e3
            line["rows"] = statistics.mean(sizes)
        if cpp is not None:
            line["p99 ratio"] = line["cpp p99"] / line["total p99"]
            line["p99 holds"] = _yes(line["p99 ratio"] >= 1)
        lines.append(line)
    return lines


def growth(quick: bool) -> list[Line]:
    """What rounds cost in pools of different sizes, and when more and more have gone before."""
    lines: list[Line] = []
    for pages in (5_000, 50_000, 500_000):  # the smallest holds 64 rows of 1,250 tokens
        rounds = in_turns((OursSteady(64, pages=pages).round, 300 if quick else 600))[0]
        total = float(np.percentile([sum(parts) for parts in rounds], 25)) / 1e3
        lines.append({"what": f"64 decodes, {pages} pages", "total": total})
    driver = OursUnderChurn(0.25)
    driven = 0
    for behind in (2000, 3000) if quick else (2000, 4000, 8000):  # the pool is full by the first
        for _ in range(behind - driven):
            driver.round()
        took = [driver.round()[0] for _ in range(500)]
        driven = behind + 500
        total = float(np.percentile(took, 25)) / 1e3
        lines.append({"what": f"churn behind {behind} rounds", "total": total})
    for line in lines:
        first = lines[0 if line in lines[:3] else 3]
        line["by the first"] = line["total"] / first["total"]
        line["bar"] = "1.3 x"
        line["holds"] = _yes(line["by the first"] <= GROWN)
    return lines


def flat_memory(rounds: int) -> None:
    """Print how this process grows over `rounds` rounds of churn, ten times."""
    driver = OursUnderChurn(0.25)
    page = os.sysconf("SC_PAGE_SIZE")
    print("   round   resident MiB   objects")
    for tenth in range(10):
        for _ in range(rounds // 10):
            driver.round()
        gc.collect()
        with open("/proc/self/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1]) * page / (1 << 20)
        print(f"{(tenth + 1) * (rounds // 10):8}   {resident:12.1f}   {len(gc.get_objects()):7}")


def judge(title: str, line: Line, slower: dict[int, float]) -> None:
    """Add ratio, bar and whether it holds to one line of a table.

    `slower` is by how much this machine is slower than the one the bars were set on, by size.
    """
    if "cpp" in line:
        line["ratio"] = line["cpp"] / line["total"]
    if title not in BARS:
        return
    size = next(iter(line.values()))
    limit, times = BARS[title].get(size, (None, None))
    parts, said = [], []
    if limit:
        parts.append(f"{limit} us")
        said.append(_yes(line["total"] <= limit))
        if size in slower:
            here = limit * slower[size]
            parts.append(f"here {here:.0f} us")
            said.append(f"here {_yes(line['total'] <= here)}")
    if times and "ratio" in line:
        parts.append(f"{times} x")
        said.append(_yes(line["ratio"] >= times))
    line["bar"] = ", ".join(parts) or "-"
    line["holds"] = ", ".join(said) or "-"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def show(title: str, lines: list[Line]) -> None:
    print(f"\n{title}")
    texts = [[_text(value) for value in line.values()] for line in lines]
    cells = [list(lines[0]), *texts]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(f"{c:>{width}}" for c, width in zip(row, widths, strict=True)))


def _text(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument(
        "--flat-memory", metavar="ROUNDS", type=int, help="only watch memory under churn"
    )
    args = parser.parse_args()
    if args.flat_memory:
        flat_memory(args.flat_memory)
        return
    parts: dict[str, Callable[[], list[Line]]] = {
        "steady decode, one group": lambda: steady(args.quick, None),
        "steady decode, full and window group": lambda: steady(args.quick, 128),
        "admission with a cached prefix": lambda: hits(args.quick),
        "hashing a prompt's pages, off the loop": lambda: hashing(args.quick),
        "churn": lambda: churn(args.quick),
        "cost by pool and by uptime": lambda: growth(args.quick),
    }
    figures: dict[str, list[Line]] = {}
    slower: dict[int, float] = {}
    for title, measure in parts.items():
        figures[title] = measure()
        # Of two groups nobody measured the peer there: one group's factors stand for theirs.
        for line in figures[title]:
            size = next(iter(line.values()))
            peer = line.get("cpp", line.get("bare loop"))
            if peer is not None and size in PEER_THERE.get(title, ()):
                slower[size] = peer / PEER_THERE[title][size]
            judge(title, line, slower)
        show(f"{title} (CPU us)", figures[title])
    report = {"benchmark": "scheduler", "machine": machine("numpy"), "figures": figures}
    write(report, args.json)


if __name__ == "__main__":
    main()
