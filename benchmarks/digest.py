"""What the lockstep digest costs a round, beyond the exchange that carries it.

    python -m benchmarks.digest [--json FILE] [--check]

A steady decode round of B rows on the first member of a replica of two: plan and results are
added, the round is closed, and the next exchange carries the digest and compares the
members'. The group is a stand-in that returns at once. What is left is all that the relay
computes in such a round, the digest and the little else.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.report import machine, write
from drumline.contract.plan import Batch, Plan, TablePatch
from drumline.contract.result import ForwardResult
from drumline.control.relay import Relay

SIZES = (1, 16, 64, 256, 1024)
BAR_US = 5.0
BAR_ROWS = 256
ROUNDS = 400
RUNS = 25


class Echo:
    """A group of two whose other member always agrees."""

    index = 0
    size = 2

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload, payload]


def batches(rows: int) -> list[tuple[Plan, ForwardResult]]:
    """Return the rounds of a steady decode batch: lengths move, one page in sixteen rounds."""
    index = np.arange(1, rows + 1, dtype=np.int32)
    ones = np.ones(rows, np.int32)
    rounds = []
    for n in range(16):
        batch = Batch(
            rows=index, generations=ones, input_lengths=ones, prefix_lengths=index * 7 + n
        )
        due = index[n::16].copy()
        patches = (TablePatch(0, due, due + 3, due + 5),) if len(due) else ()
        plan = Plan(round=n, batch=batch, patches=patches)
        rounds.append((plan, ForwardResult(tokens=index * 3 + n, counts=ones.copy())))
    return rounds


def measured(run: Callable[[], None]) -> float:
    """Return microseconds of one of the `ROUNDS` rounds of a run, in the quietest of many."""
    best = float("inf")
    for _ in range(RUNS):
        began = time.perf_counter_ns()
        run()
        best = min(best, time.perf_counter_ns() - began)
    return best / ROUNDS / 1000


def digested(rows: int) -> float:
    """Return what a round costs with its digest, in a replica of two."""
    relay = Relay(Echo())  # type: ignore[arg-type]  # it gathers, and no more
    rounds = batches(rows)

    def run() -> None:
        for n in range(ROUNDS):
            plan, result = rounds[n & 15]
            relay.exchange((), False, 0)
            relay.add_plan(plan)
            relay.add_result(result)
            relay.close()

    return measured(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="fail above the bar")
    options = parser.parse_args()
    figures = {rows: digested(rows) for rows in SIZES}
    for rows, cost in figures.items():
        print(f"B = {rows:4}   {cost:5.2f} us a round")
    report = {"benchmark": "digest", "machine": machine("xxhash"), "digest_us": figures}
    write(report, options.json)
    return int(options.check and figures[BAR_ROWS] > BAR_US)


if __name__ == "__main__":
    sys.exit(main())
