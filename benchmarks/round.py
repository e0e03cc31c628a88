"""CPU time of a round: the whole control plane and the scheduler, without a model.

    python -m benchmarks.round [--json FILE] [--batch 1 16 64 256 1024] [--rounds 600]
    python -m benchmarks.round --soak 1000000

The data plane is a counter, whose own time is measured and taken off. A round is the
control thread's CPU time for one pass of the loop. `steady` is decoding with nothing
arriving, streamed, at depth 1; `depth 0` and `whole` (not streamed) are its variants;
`scheduler` is the scheduler's plan and commit in it, measured in a run of its own;
`churn` keeps the batch full while requests end and arrive all the time. Figures are
medians of chunks, with the least disturbed chunk beside. The soak runs the churn and
reports memory.
"""

import argparse
import gc
import os
import random
import resource
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import machine, write
from drumline.collective.solo import SoloGroup
from drumline.contract.messages import Submitted
from drumline.contract.request import GenerateRequest
from drumline.contract.result import ForwardResult
from drumline.control.event_loop import EventLoop, Ranks
from drumline.control.ingress import Limits
from drumline.core.hashing import page_digests
from drumline.replay.clock import ManualClock
from drumline.replay.simulator import small_specs
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.scheduler import Scheduler

PROMPT = 512
CONTEXT = 4096
PAGE = 16
VOCAB = 49_152
CHUNKS = 20


class Stopwatch:
    """CPU time spent inside, by thread."""

    def __init__(self):
        self.ns = 0
        self.cost = 0
        self._since = 0
        for _ in range(1000):
            with self:
                pass
        # What looking at the clock costs, which is not the work's.
        self.cost, self.ns = self.ns // 1000, 0

    def __enter__(self):
        self._since = time.thread_time_ns()

    def __exit__(self, *exception):
        self.ns += time.thread_time_ns() - self._since - self.cost


class CountingPlane:
    """A data plane that knows nothing: each sampling row gets the next number."""

    def __init__(self):
        self.own = Stopwatch()
        self.tokens = 0
        self._batches: deque[Any] = deque()
        self._tickets = 0

    def admit(self, requests):
        pass

    def release(self, rids):
        pass

    def execute(self, plan, dispatch):
        with self.own:
            if plan.batch is None:
                return None
            self._batches.append(plan.batch)
            self._tickets += 1
            return self._tickets

    def complete(self, ticket):
        with self.own:
            batch = self._batches.popleft()
            counts = np.ones(batch.size, np.int32)
            if batch.extends:
                heads = slice(0, batch.extends)
                ends = batch.prefix_lengths[heads] + batch.input_lengths[heads]
                counts[heads] = ends >= batch.prompt_lengths
            tokens = (np.arange(int(counts.sum())) + ticket).astype(np.int32) % 40_000 + 100
            self.tokens += len(tokens)
            return ForwardResult(tokens=tokens, counts=counts)


class Arrivals:
    """A frontend that hands over what was queued and forgets what it is told."""

    closed = False

    def __init__(self):
        self.queue = []
        self.ended = 0
        self.streamed = 0

    def receive(self, wait_s):
        queued, self.queue = self.queue, []
        return queued

    def send(self, outputs, load):
        self.streamed += len(outputs.rids)
        self.ended += len(outputs.rids) - outputs.finished_reasons.count("")

    def reply(self, reply):
        pass


class TimedScheduler:
    """The scheduler, with the CPU time of its plan and advance."""

    def __init__(self, scheduler):
        self._scheduler = scheduler
        self.own = Stopwatch()

    def plan(self):
        with self.own:
            return self._scheduler.plan()

    def advance(self, events):
        with self.own:
            self._scheduler.advance(events)

    def __getattr__(self, name):
        return getattr(self._scheduler, name)


class Bench:
    """One rank with a full batch of `size` requests."""

    def __init__(self, size, *, depth=1, timed=False, stream=True):
        specs = small_specs(
            num_pages=(size + 2) * CONTEXT // PAGE,
            block_tokens=PAGE,
            prefix_granularity=64,
            max_rows=size,
            max_scheduled_tokens=8192,
            max_model_len=CONTEXT,
            vocab_size=VOCAB,
        )
        scheduler = Scheduler(
            SchedulerConfig(
                groups=specs.groups,
                num_pages=specs.num_pages,
                prefix_granularity=specs.prefix_granularity,
                max_rows=size,
                max_scheduled_tokens=specs.max_scheduled_tokens,
                max_model_tokens=CONTEXT,
                overlap_depth=depth,
            )
        )
        self.size, self.stream = size, stream
        self.scheduler = TimedScheduler(scheduler) if timed else scheduler
        self.plane, self.frontend, self.clock = CountingPlane(), Arrivals(), ManualClock()
        self.random = random.Random(size)
        self.submitted = 0
        self.loop = EventLoop(
            scheduler=self.scheduler,  # type: ignore[arg-type]  # one that is timed, too
            data_plane=self.plane,  # type: ignore[arg-type]  # as much as these rounds ask of it
            frontend=self.frontend,
            clock=self.clock,
            ranks=Ranks(SoloGroup(), SoloGroup()),
            limits=Limits.of(specs, scheduler.max_request_tokens),
            specs=specs,
            in_flight_depth=depth,
        )

    def submit(self, prompt_tokens, new_tokens):
        self.submitted += 1
        ids = np.array([self.random.randrange(1, VOCAB) for _ in range(prompt_tokens)], np.int32)
        self.frontend.queue.append(
            Submitted(
                GenerateRequest(
                    rid=f"request-{self.submitted}",
                    input_ids=ids,
                    max_new_tokens=new_tokens,
                    ignore_eos=True,
                    stream=self.stream,
                    page_digests=page_digests(ids, 64),
                )
            )
        )

    def refill(self, prompt_tokens, new_tokens):
        """Queue as many requests as have ended."""
        while self.submitted - self.frontend.ended < self.size:
            self.submit(prompt_tokens(), new_tokens())

    def round(self):
        self.loop.round(False)
        self.clock.advance(1000)

    def fill(self):
        """Submit a full batch and run until every request decodes."""
        for _ in range(self.size):
            self.submit(PROMPT, CONTEXT - PROMPT)
        while self.scheduler.sizes().decoding < self.size:
            self.round()
        for _ in range(80):
            self.round()

    def measure(self, rounds, before=lambda: None, part=None):
        """Return the µs of CPU a round, by chunk, the fake's own taken off.

        `part` is the stopwatch of a part of the round that is asked for instead.
        """
        own = self.plane.own
        chunk = max(rounds // CHUNKS, 10)
        figures = []
        for _ in range(0, rounds, chunk):
            watch, fake, partly = Stopwatch(), own.ns, part.ns if part else 0
            for _ in range(chunk):
                before()
                with watch:
                    self.loop.round(False)
                self.clock.advance(1000)
            spent = part.ns - partly if part else watch.ns - (own.ns - fake)
            figures.append(spent / chunk / 1000)
        return figures


def summary(figures):
    """Return the median chunk, and the least disturbed one."""
    ordered = sorted(figures)
    return {"median": round(ordered[len(ordered) // 2], 1), "best": round(ordered[0], 1)}


def steady(size, rounds, **options):
    bench = Bench(size, **options)
    bench.fill()
    part = bench.scheduler.own if isinstance(bench.scheduler, TimedScheduler) else None
    return summary(bench.measure(min(rounds, CONTEXT - PROMPT - 300), part=part))


def churn_arrivals(bench):
    draw = bench.random.randrange
    return lambda: bench.refill(lambda: draw(16, 256), lambda: draw(16, 256))


def churn(size, rounds):
    bench = Bench(size)
    arrive = churn_arrivals(bench)
    for _ in range(300):
        arrive()
        bench.round()
    return summary(bench.measure(rounds, arrive))


FIGURES = {
    "steady": "steady",
    "steady_depth0": "depth 0",
    "steady_not_streamed": "whole",
    "scheduler": "scheduler",
    "churn": "churn",
}


def measure(size, rounds):
    return {
        "batch": size,
        "steady": steady(size, rounds),
        "steady_depth0": steady(size, rounds, depth=0),
        "steady_not_streamed": steady(size, rounds, stream=False),
        "scheduler": steady(size, rounds, timed=True),
        "churn": churn(size, rounds),
    }


def soak(rounds, size=8):
    """Run the churn and return memory at the start, on the way and at the end."""
    bench = Bench(size)
    arrive = churn_arrivals(bench)
    marks = []
    started = time.perf_counter()
    for n in range(rounds + 1):
        if n % max(rounds // 10, 1) == 0:
            gc.collect()
            marks.append({"round": n, "rss_mib": round(rss_mib(), 1)})
            print(f"  round {n:>9}: {marks[-1]['rss_mib']} MiB", flush=True)
        arrive()
        bench.round()
    bench.loop.check()
    return {
        "rounds": rounds,
        "batch": size,
        "requests": bench.frontend.ended,
        "seconds": round(time.perf_counter() - started, 1),
        "memory": marks,
        # The first tenth fills what is bounded: rings, the prefix index, the pool.
        "growth_mib": round(marks[-1]["rss_mib"] - marks[1]["rss_mib"], 1),
    }


def rss_mib():
    """Return this process's resident memory; its peak where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--soak", type=int, default=0, help="rounds of churn, for memory")
    options = parser.parse_args(argv)
    report: dict[str, Any] = {
        "benchmark": "round",
        "unit": "µs of CPU per round",
        "machine": machine("numpy", "msgspec"),
    }
    if options.soak:
        report["soak"] = soak(options.soak)
        print(f"memory grew by {report['soak']['growth_mib']} MiB after the first tenth")
    else:
        print("µs of CPU a round, median (best) of chunks")
        print(f"{'batch':>6}" + "".join(f"{title:>16}" for title in FIGURES.values()))
        report["results"] = []
        for size in options.batch:
            row = measure(size, options.rounds)
            report["results"].append(row)
            cells = (f"{row[name]['median']} ({row[name]['best']})" for name in FIGURES)
            print(f"{size:>6}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    write(report, options.json)
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
