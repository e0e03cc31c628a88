"""What a client sees: time to the first token, between tokens, and tokens a second.

    python -m benchmarks.serve [--json FILE] [--streams 1 16 64] [--prompt 64] [--tokens 32]
                               [--model MODEL] [--ways offline http]

`offline` is `AsyncLLM` in this process, `http` the server in another one with streamed
completions. All streams begin at the same moment; prompts are random token ids, so that no
prefix is found again, and no answer ends before its length. The time to the first token
therefore has the prefill of all streams in it. Under load the chunks of a stream may carry
several tokens; the gap is that between chunks.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.programs import served
from benchmarks.report import machine, write
from drumline import AsyncLLM, SamplingParams
from drumline.bench.client import connected, target_of
from drumline.bench.figures import percentile

Grown = Callable[[int], None]
"""Told how many tokens an answer has, whenever it has grown."""
Ask = Callable[[list[int], Grown], Awaitable[None]]


class Measured:
    """The times of one run, in seconds."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.tokens = 0

    async def follow(self, ask: Ask, prompt: list[int]) -> None:
        """Have a prompt answered."""
        last = time.perf_counter()
        total = 0

        def grown(count: int) -> None:
            nonlocal last, total
            now = time.perf_counter()
            (self.gaps if total else self.first).append(now - last)
            last, total = now, count

        await ask(prompt, grown)
        self.tokens += total

    def row(self, streams: int, seconds: float) -> dict[str, float]:
        return {
            "streams": streams,
            "ttft_p50_ms": _ms(self.first, 0.5),
            "ttft_p95_ms": _ms(self.first, 0.95),
            "itl_p50_ms": _ms(self.gaps, 0.5),
            "itl_p95_ms": _ms(self.gaps, 0.95),
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / seconds, 1),
        }


def _ms(values: list[float], share: float) -> float:
    return round(1e3 * percentile(values, share), 1) if values else 0.0


def prompts(count: int, length: int) -> list[list[int]]:
    lots = random.Random(count)
    return [[lots.randrange(1000, 40_000) for _ in range(length)] for _ in range(count)]


async def run(options: argparse.Namespace, ask: Ask) -> list[dict[str, float]]:
    """Measure `ask` at every number of streams."""
    warm = Measured()
    await warm.follow(ask, prompts(1, options.prompt)[0])
    rows = []
    for streams in options.streams:
        measured = Measured()
        began = time.perf_counter()
        await asyncio.gather(
            *(measured.follow(ask, prompt) for prompt in prompts(streams, options.prompt))
        )
        rows.append(measured.row(streams, time.perf_counter() - began))
        show(rows[-1])
    return rows


def offline(options: argparse.Namespace) -> list[dict[str, float]]:
    return asyncio.run(_offline(options))


async def _offline(options: argparse.Namespace) -> list[dict[str, float]]:
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    async with AsyncLLM(options.model) as llm:

        async def ask(prompt: list[int], grown: Grown) -> None:
            async for output in llm.generate(prompt, params):
                grown(len(output.outputs[0].token_ids))

        return await run(options, ask)


def http(options: argparse.Namespace) -> list[dict[str, float]]:
    with served([options.model] if options.model else []) as server:
        return asyncio.run(_http(options, server.url))


async def _http(options: argparse.Namespace, url: str) -> list[dict[str, float]]:
    body = {
        "max_tokens": options.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    target = target_of(url)

    async def ask(prompt: list[int], grown: Grown) -> None:
        def heard(data: bytes) -> None:
            event = json.loads(data)
            if event["choices"] and event["usage"]["completion_tokens"]:
                grown(event["usage"]["completion_tokens"])

        async with connected(target) as connection:
            await connection.post(
                "/v1/completions", json.dumps(body | {"prompt": prompt}).encode(), heard
            )

    return await run(options, ask)


def show(row: dict[str, float]) -> None:
    print("".join(f"{value:>14}" for value in row.values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--model", help="the embedded one by default")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    report: dict[str, object] = {
        "benchmark": "serve",
        "prompt_tokens": options.prompt,
        "answer_tokens": options.tokens,
        "machine": machine(),
    }
    for way in options.ways:
        titles = ("streams", "ttft p50 ms", "ttft p95 ms", "itl p50 ms", "itl p95 ms")
        print(f"{way}: prompts of {options.prompt} tokens, answers of {options.tokens}")
        print("".join(f"{title:>14}" for title in (*titles, "tokens", "tokens/s")), flush=True)
        report[way] = WAYS[way](options)
    write(report, options.json)


WAYS = {"offline": offline, "http": http}

if __name__ == "__main__":
    main()
