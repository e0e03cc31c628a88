"""Time of drawing a batch's tokens: PyTorch beside kernels, by way of drawing.

    python -m benchmarks.sampling [--json FILE] [--batch 1 16 64] [--vocab 49152 151936]

Both draw from the same logits in turn, `--rounds` times; figures are medians of the forward
thread's processor time, its kernels' threads included, in ms a step, everything around the draw
among it. The logits are normal and as wide as a model's (`sharp`), or so flat that a nucleus
is thousands of tokens (`flat`).
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import machine, write
from drumline.contract.ports import LogprobPlan
from drumline.contract.request import Admission, Sampling
from drumline.device.kernels.native import Machine, find_kernels
from drumline.device.kernels.trial import tried
from drumline.device.sampling.sampler import Sampler

WAYS = {
    "greedy": (Sampling(top_k=1), 4.0, 0),
    "temperature": (Sampling(temperature=0.8, seed=3), 4.0, 0),
    "top-k, top-p": (Sampling(top_k=50, top_p=0.9, seed=3), 4.0, 0),
    "top-p": (Sampling(top_p=0.95, seed=3), 4.0, 0),
    "top-p, flat": (Sampling(top_p=0.95, seed=3), 1.0, 0),
    "penalties": (Sampling(top_k=1, repetition_penalty=1.1, presence_penalty=0.2), 4.0, 0),
    "log probabilities": (Sampling(top_k=1), 4.0, 5),
}
PROMPT = 512


class Side:
    """A sampler with the same requests on its rows."""

    def __init__(self, machine, rows, vocab, sampling):
        self.sampler = Sampler(rows, vocab, machine=machine)
        self.rows = np.arange(rows, dtype=np.int32)
        prompt = (np.arange(PROMPT) * 31 % vocab).astype(np.int32)
        for row in range(rows):
            self.sampler.admit(
                [
                    Admission(
                        rid=str(row), prompt_tokens=PROMPT, prompt_ids=prompt, sampling=sampling
                    )
                ]
            )
            self.sampler.bind(row, str(row))

    @torch.inference_mode()
    def step(self, logits, position, top):
        """Return the processor time of a step, in ms, and what it drew."""
        wanted = LogprobPlan(self.rows, np.full(len(self.rows), top, np.int32)) if top else None
        positions = np.full(len(self.rows), position, np.int32)
        begun = time.process_time()
        drawn = self.sampler.sample(logits, self.rows, positions, wanted)
        return (time.process_time() - begun) * 1e3, drawn.tokens.tolist()


def measured(machine, way, rows, vocab, rounds):
    sampling, width, top = WAYS[way]
    sides = [Side(None, rows, vocab, sampling), Side(machine, rows, vocab, sampling)]
    took: list[list[float]] = [[], []]
    generator = torch.Generator().manual_seed(rows)
    for turn in range(rounds + 1):
        logits = torch.randn((rows, vocab), generator=generator) * width
        tokens = []
        for side, times in zip(sides, took, strict=True):
            ms, drawn = side.step(logits.clone(), PROMPT + turn, top)
            tokens.append(drawn)
            if turn:  # the first one grows memory
                times.append(ms)
        if tokens[0] != tokens[1]:
            raise SystemExit(f"{way}, {rows} rows of {vocab}: the two draw different tokens")
    torch_ms, kernels_ms = (statistics.median(times) for times in took)
    return {
        "way": way,
        "batch": rows,
        "vocab": vocab,
        "torch": round(torch_ms, 3),
        "kernels": round(kernels_ms, 3),
        "times quicker": round(torch_ms / kernels_ms, 1),
    }


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--batch", type=int, nargs="*", default=[1, 16, 64])
    arguments.add_argument("--vocab", type=int, nargs="*", default=[49_152, 151_936])
    arguments.add_argument("--rounds", type=int, default=9)
    asked = arguments.parse_args()
    found = find_kernels(tried)
    if found.kernels is None:
        raise SystemExit(f"there are no kernels here: {found.why_none}")
    threads = Machine(found.kernels, torch.get_num_threads())
    figures = []
    print(f"{'way':<20}{'vocab':>8}{'batch':>7}{'torch ms':>11}{'kernels ms':>12}{'times':>8}")
    for vocab in asked.vocab:
        for way in WAYS:
            for rows in asked.batch:
                row = measured(threads, way, rows, vocab, asked.rounds)
                figures.append(row)
                print(
                    f"{way:<20}{vocab:>8}{rows:>7}{row['torch']:>11}{row['kernels']:>12}"
                    f"{row['times quicker']:>8}",
                    flush=True,
                )
    report = {
        "benchmark": "sampling",
        "unit": "ms of processor time a step",
        "machine": machine("torch"),
        "threads": threads.threads,
        "kernels": found.kernels.name,
        "figures": figures,
    }
    write(report, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
