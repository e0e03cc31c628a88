"""What a scheduler round costs, in CPU microseconds of the thread that plans.

    python benchmarks/scheduler.py [--quick] [--json FILE]

Every figure is a median of `time.thread_time_ns` over the rounds measured. Where the
published C++ scheduler (`tokenspeed-scheduler`, CPython 3.11) is installed, it does the
same work in the same process, beside ours.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.core.hashing import page_digests
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.events import Finished, RequestSpec, Results
from drumline.scheduler.scheduler import Scheduler

try:
    import tokenspeed_scheduler as cpp
except ImportError:
    cpp = None

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


def ours_steady(rows: int, rounds: int, window: int | None = None) -> dict[str, float]:
    """Plan and commit of `rows` decodes, prompts of about 512 tokens, hashing on."""
    scheduler = Scheduler(config(rows, 120_000, window))
    rng = np.random.default_rng(0)
    scheduler.submit(
        [
            RequestSpec(
                rid=f"r{at}",
                tokens=rng.integers(0, 32_000, 512 + at % PAGE).astype(np.int32),
            )
            for at in range(rows)
        ]
    )
    ones = np.ones(rows, np.int32)
    plans, commits, totals = [], [], []
    for number in range(rounds + 20):
        start = now()
        plan = scheduler.plan()
        planned = now()
        batch = plan.batch
        results = Results(rows=batch.rows, generations=batch.generations, counts=ones, tokens=ones)
        before = now()
        scheduler.advance([results])
        end = now()
        if number >= 20:
            plans.append(planned - start)
            commits.append(end - before)
            totals.append(planned - start + end - before)
    return {"plan": median(plans), "commit": median(commits), "total": median(totals)}


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


def cpp_read(plan) -> list[str]:
    """Look at what a caller needs of a plan; returns the request ids."""
    batch = plan.forward[0]
    rids = batch.request_ids
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


def cpp_steady(rows: int, rounds: int, window: int | None = None) -> dict[str, float]:
    scheduler = cpp.Scheduler(cpp_config(rows, 120_000, window))
    rng = np.random.default_rng(0)
    scheduler.submit_requests(
        [
            cpp_spec(f"r{at}", rng.integers(0, 32_000, 512 + at % PAGE).tolist())
            for at in range(rows)
        ]
    )
    totals = []
    for number in range(rounds + 20):
        start = now()
        rids = cpp_read(scheduler.next_execution_plan())
        cpp_advance(scheduler, rids)
        if number >= 20:
            totals.append(now() - start)
    return {"total": median(totals)}


def steady(quick: bool, window: int | None) -> list[dict[str, object]]:
    lines = []
    for rows in (1, 16, 64, 256, 1024):
        rounds = 100 if quick else 400
        line: dict[str, object] = {"rows": rows, **ours_steady(rows, rounds, window)}
        if cpp is not None:
            line["cpp"] = cpp_steady(rows, min(rounds, 20_000 // rows + 20), window)["total"]
            line["ratio"] = line["cpp"] / line["total"]
        lines.append(line)
    return lines


def ours_hit(length: int, repeats: int) -> dict[str, float]:
    """Submission and admission of a prompt of which `length` tokens are cached."""
    scheduler = Scheduler(config(8, 40_000))
    rng = np.random.default_rng(0)
    base = rng.integers(0, 32_000, length).astype(np.int32)
    hashing, submits, plans = [], [], []
    for number in range(repeats + 2):
        tokens = np.concatenate((base, rng.integers(0, 32_000, 16).astype(np.int32)))
        start = now()
        digests = page_digests(tokens, PAGE)
        hashed = now()
        scheduler.submit([RequestSpec(rid=f"r{number}", tokens=tokens, page_digests=digests)])
        submitted = now()
        plan = scheduler.plan()
        end = now()
        if number >= 2:
            assert plan.batch.prefix_lengths.tolist() == [length]
            hashing.append(hashed - start)
            submits.append(submitted - hashed)
            plans.append(end - submitted)
        _commit(scheduler, plan.batch)
        scheduler.advance([Finished(f"r{number}")])
        scheduler.plan()
    total = [one + two for one, two in zip(submits, plans, strict=True)]
    return {
        "hash": median(hashing),
        "submit": median(submits),
        "plan": median(plans),
        "total": median(total),
    }


def _commit(scheduler: Scheduler, batch) -> None:
    ones = np.ones(batch.size, np.int32)
    scheduler.advance(
        [Results(rows=batch.rows, generations=batch.generations, counts=ones, tokens=ones)]
    )


def cpp_hit(length: int, repeats: int) -> dict[str, float]:
    scheduler = cpp.Scheduler(cpp_config(8, 40_000))
    rng = np.random.default_rng(0)
    base = rng.integers(0, 32_000, length)
    submits, plans = [], []
    for number in range(repeats + 2):
        tokens = np.concatenate((base, rng.integers(0, 32_000, 16))).tolist()
        rid = f"r{number}"
        spec = cpp_spec(rid, tokens)
        start = now()
        scheduler.submit_requests([spec])
        submitted = now()
        plan = scheduler.next_execution_plan()
        cpp_read(plan)
        end = now()
        if number >= 2:
            submits.append(submitted - start)
            plans.append(end - submitted)
        cpp_advance(scheduler, [rid])
        event = cpp.ExecutionEvent()
        finish = cpp.ForwardEvent.Finish()
        finish.request_id = rid
        event.add_event(finish)
        scheduler.advance(event)
        scheduler.next_execution_plan()
    return {"submit": median(submits), "plan": median(plans)}


def hits(quick: bool) -> list[dict[str, object]]:
    lines = []
    for length in (2048, 32_768):
        repeats = 10 if quick else 40
        line: dict[str, object] = {"hit": length, **ours_hit(length, repeats)}
        if cpp is not None:
            line["cpp"] = sum(cpp_hit(length, repeats).values())
        lines.append(line)
    return lines


def show(title: str, lines: list[dict[str, object]]) -> None:
    print(f"\n{title}")
    names = list(lines[0])
    print("  ".join(f"{name:>8}" for name in names))
    for line in lines:
        cells = (line[name] for name in names)
        print("  ".join(f"{c:8.1f}" if isinstance(c, float) else f"{c!s:>8}" for c in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    args = parser.parse_args()
    parts: dict[str, Callable[[], list[dict[str, object]]]] = {
        "steady decode, one group": lambda: steady(args.quick, None),
        "admission with a cached prefix": lambda: hits(args.quick),
    }
    figures = {}
    for title, measure in parts.items():
        figures[title] = measure()
        show(f"{title} (CPU us)", figures[title])
    if args.json:
        record = {"machine": platform.processor() or platform.machine(), "figures": figures}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
