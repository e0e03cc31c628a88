"""What holding answers to grammars costs, on the embedded model's vocabulary.

    python -m benchmarks.grammar [--json FILE] [--backend xgrammar] [--rows 1 16 64]

`fill` is filling one row's mask and `accept` taking its token, µs of CPU, along answers
that fit. `held` is what a draw of a batch whose rows are all held to a grammar costs more
than one of free rows, ms of CPU. `delay` is what compiling grammars one after the other
adds to the 99th percentile of a control-plane round's time: without a model, on a batch
that decodes, in turns with rounds beside which nothing compiles; and beside, to a decode
step of the real model. `own` is that time less what its thread was ready to run and no
processor was free, which says more of the machine than of the engine.
"""

import argparse
import contextlib
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.device import CONTEXT, Feeder
from benchmarks.report import machine, write
from benchmarks.round import Bench
from drumline.contract.grammar import Attachment, Compiling, GrammarKey, GrammarKind
from drumline.contract.request import Admission, Sampling
from drumline.core.clock import SystemClock
from drumline.core.config import (
    CacheConfig,
    Config,
    GrammarBackend,
    GrammarConfig,
    ScheduleConfig,
)
from drumline.core.model_files import find_model
from drumline.device.build import build
from drumline.device.data_plane import QueuedDataPlane
from drumline.device.forward_thread import ForwardThread
from drumline.device.sampling.sampler import Sampler
from drumline.frontend.text.load import load_tokenizer
from drumline.grammar.backends import open_backend
from drumline.grammar.compiler import GrammarCache
from drumline.grammar.prepare import prepared
from drumline.grammar.vocabulary import read_vocabulary

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["rock", "jazz"]}, "maxItems": 3},
        "plays": {"type": "boolean"},
        "about": {"type": "string"},
    },
    "required": ["name", "age", "tags", "plays", "about"],
}
ANSWER = {
    "name": "Ann Lee",
    "age": 42,
    "tags": ["rock", "jazz"],
    "plays": True,
    "about": 'A drummer of the north, who plays "everything" since 1999.',
}
ANY = {"title": "The quick brown fox", "list": [1, 2.5, None, {"x": "y"}], "in": {"deep": [True]}}
CASES: dict[str, tuple[Any, Any, list[Any]]] = {
    "schema": (GrammarKind.JSON_SCHEMA, json.dumps(PERSON), [ANSWER]),
    "any object": (GrammarKind.JSON_OBJECT, "", [ANY, ANSWER]),
}
ROUNDS = 400
TURNS = 8


class Bed:
    """A backend, the texts that fit, and their tokens."""

    def __init__(self, backend):
        files = find_model(None)
        self.tokenizer = load_tokenizer(files)
        self.eos = 2
        self.vocabulary = read_vocabulary(files, self.tokenizer.vocab_size, (self.eos,))
        self.name = backend
        self.backend = open_backend(backend, self.vocabulary)

    def grammar(self, kind, source):
        return self.backend.compile(prepared(GrammarKey(kind, source)))

    def tokens(self, value):
        """Return the answer `value`, compact and spaced out over lines, as tokens with an end."""
        for text in (json.dumps(value), json.dumps(value, indent=2)):
            yield [*self.tokenizer.encode(text, add_special=False), self.eos]


def follow(bed, kind, source, values):
    """Return µs of CPU for each fill and each accept along the answers."""
    grammar = bed.grammar(kind, source)
    masks = np.zeros((1, bed.vocabulary.mask_words), np.int32)
    fills, accepts = [], []
    for _ in range(3):
        for value in values:
            for tokens in bed.tokens(value):
                matcher = grammar.matcher()
                for token in tokens:
                    began = time.thread_time_ns()
                    matcher.fill(masks, 0)
                    filled = time.thread_time_ns()
                    taken = matcher.accept(token)
                    accepts.append((time.thread_time_ns() - filled) / 1000)
                    fills.append((filled - began) / 1000)
                    assert taken, "the answer does not fit"
    return fills, accepts


def spread(figures):
    return {
        "median": round(statistics.median(figures), 1),
        "mean": round(statistics.fmean(figures), 1),
        "p99": round(float(np.percentile(figures, 99)), 1),
    }


class Draws:
    """A batch of rows that draw an answer each, one some tokens behind the other."""

    def __init__(self, bed, rows, greedy, held):
        kind, source, [value] = CASES["schema"]
        self.grammar = bed.grammar(kind, source) if held else None
        self.script = next(bed.tokens(value))
        self.rows = np.arange(1, rows + 1, dtype=np.int32)
        self.greedy = greedy
        self.sampler = Sampler(rows + 1, bed.vocabulary.size)
        self.at = [0] * rows
        self.logits = torch.randn(rows, bed.vocabulary.size, generator=torch.manual_seed(0))
        self.spent: list[float] = []
        for row in range(rows):
            self.restart(row)
        for step in range(len(self.script)):
            self.step(rows * step // len(self.script))
        self.spent.clear()

    def restart(self, row):
        rid = f"r{row}"
        self.sampler.release([rid])
        top_k = 1 if self.greedy else 1 << 30
        self.sampler.admit(
            [Admission(rid=rid, prompt_tokens=1, sampling=Sampling(seed=row, top_k=top_k))]
        )
        if self.grammar is not None:
            self.sampler.attach([Attachment(rid, self.grammar)])
        self.sampler.bind(row + 1, rid)
        self.at[row] = 0

    def step(self, begun=None):
        """Draw once; rows from `begun` on stay at their answer's beginning meanwhile."""
        rows = self.rows[:begun] if begun is not None else self.rows
        if not len(rows):
            return
        logits = self.logits[: len(rows)].clone()
        wanted = [self.script[at] for at in self.at[: len(rows)]]
        logits[torch.arange(len(rows)), wanted] = 60.0
        positions = np.array(self.at[: len(rows)], np.int32)
        began = time.thread_time_ns()
        sampled = self.sampler.sample(logits, rows, positions)
        self.spent.append((time.thread_time_ns() - began) / 1e6)
        assert sampled.tokens.tolist() == wanted
        assert not sampled.faults
        for row in range(len(rows)):
            self.at[row] += 1
            if self.at[row] == len(self.script):
                self.restart(row)


def held_draws(bed, rows, greedy, steps=60):
    """Return ms of CPU for a draw of free rows and of held ones, step by step in turns."""
    free, held = (Draws(bed, rows, greedy, holds) for holds in (False, True))
    for _ in range(steps):
        free.step()
        held.step()
    return statistics.median(free.spent), statistics.median(held.spent)


class Compiles:
    """Compiles schemas, each a new one, while it is let."""

    def __init__(self, backend, vocabulary):
        config = GrammarConfig(grammar_backend=backend)
        self.cache = GrammarCache(config, lambda: vocabulary, SystemClock())
        self.done = 0
        self._runs = threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=self._compile, daemon=True)
        self._thread.start()

    def __enter__(self):
        self._runs.set()

    def __exit__(self, *exception):
        self._runs.clear()

    def close(self):
        self._ends = True
        self._runs.set()
        self._thread.join()
        self.cache.close()

    def one(self):
        properties = {f"p{self.done}_{n}": {"type": "string"} for n in range(40)}
        source = json.dumps({**PERSON, "properties": {**PERSON["properties"], **properties}})
        key = GrammarKey(GrammarKind.JSON_SCHEMA, source)
        self.cache.request(key)
        while isinstance(self.cache.state(key), Compiling):
            time.sleep(0.002)
        self.done += 1

    def _compile(self):
        while self._runs.wait() and not self._ends:
            self.one()


class Stopwatch:
    """Times pieces of one thread's work."""

    def __init__(self):
        self.wall_ms, self.own_ms = [], []

    @contextlib.contextmanager
    def piece(self):
        queued, began = self._queued_ns(), time.perf_counter_ns()
        yield
        wall = time.perf_counter_ns() - began
        self.wall_ms.append(wall / 1e6)
        self.own_ms.append((wall - self._queued_ns() + queued) / 1e6)

    @staticmethod
    def _queued_ns():
        """Return how long this thread has been ready and waited for a processor."""
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


def timed_turns(compiles, work):
    """Return how long `work` takes, while nothing compiles and while something does."""
    quiet, busy = Stopwatch(), Stopwatch()
    for turn in range(TURNS):
        if turn % 2:
            with compiles:
                work(busy)
        else:
            time.sleep(0.3)  # what was begun ends
            work(quiet)
    return quiet, busy


def delays(backend, vocabulary, forwards):
    """Return what compiling adds to a round without a model, and to a step of the real one."""
    sys.setswitchinterval(1e-4)  # as a rank sets it
    compiles = Compiles(backend, vocabulary)
    compiles.one()  # loads the library and starts the worker
    found = {"round": compared(*timed_turns(compiles, rounds_without_a_model()))}
    if forwards:
        with steps_of_the_model() as steps:
            found["forward"] = compared(*timed_turns(compiles, steps))
    compiles.close()
    return {**found, "compiled": compiles.done}


def rounds_without_a_model():
    bench = Bench(64)
    bench.fill()

    def rounds(watch):
        for _ in range(ROUNDS):
            with watch.piece():
                bench.loop.round(False)
            bench.clock.advance(1000)
            time.sleep(0.002)  # a forward's time, in which the control thread waits

    return rounds


@contextlib.contextmanager
def steps_of_the_model(rows=4, count=15):
    thread = ForwardThread()
    config = Config(
        cache=CacheConfig(max_total_tokens=rows * 2048),
        schedule=ScheduleConfig(max_num_seqs=rows),
    )
    built = build(config, thread)
    plane = QueuedDataPlane(built.handle, thread)
    feeder = Feeder(plane, built.specs.model.vocab_size)
    plane.complete(feeder.prefill(CONTEXT, TURNS * count + 2))
    feeder.multiply(rows)

    def steps(watch):
        for _ in range(count):
            with watch.piece():
                plane.complete(feeder.decode())

    try:
        yield steps
    finally:
        plane.shutdown()


def compared(quiet, busy):
    found = {}
    for name, pair in (
        ("wall", (quiet.wall_ms, busy.wall_ms)),
        ("own", (quiet.own_ms, busy.own_ms)),
    ):
        p99s = [float(np.percentile(times, 99)) for times in pair]
        found[name] = {
            "median_ms": [round(statistics.median(times), 3) for times in pair],
            "p99_ms": [round(p, 3) for p in p99s],
            "delay_p99_ms": round(p99s[1] - p99s[0], 3),
        }
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--backend", type=GrammarBackend, default=GrammarBackend.XGRAMMAR)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--no-forwards", action="store_true", help="load no model for delays")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    bed = Bed(options.backend)
    report: dict[str, Any] = {
        "benchmark": "grammar",
        "backend": options.backend,
        "machine": machine("torch"),
    }
    report["fill_us"], report["accept_us"] = {}, {}
    print(f"{options.backend}: µs of CPU, median, mean and 99th percentile")
    for name, (kind, source, values) in CASES.items():
        fills, accepts = map(spread, follow(bed, kind, source, values))
        report["fill_us"][name], report["accept_us"][name] = fills, accepts
        print(f"  {name:12} fill {fills}  accept {accepts}", flush=True)
    print("ms of CPU for a draw of free rows, of held ones, and the difference")
    report["draws"] = []
    for rows in options.rows:
        for greedy in (True, False):
            free, held = held_draws(bed, rows, greedy)
            report["draws"].append(
                {
                    "rows": rows,
                    "greedy": greedy,
                    "free_ms": round(free, 3),
                    "held_ms": round(held, 3),
                    "overhead_ms": round(held - free, 3),
                }
            )
            way = "greedy" if greedy else "random"
            print(f"  {rows:4} {way}: {free:.3f} {held:.3f} {held - free:+.3f}", flush=True)
    report["delay"] = delays(options.backend, bed.vocabulary, not options.no_forwards)
    print("ms of a round while nothing and while something compiles:", report["delay"])
    write(report, options.json)
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
