"""What is made of answers: rates over a work, and percentiles over its requests."""

import statistics
from collections.abc import Callable, Sequence

from benchmarks.peers.engine import Answer
from benchmarks.peers.work import Work
from drumline.bench.figures import percentile

Figure = Callable[[Work, Sequence[Answer]], float]


def seconds(answers: Sequence[Answer]) -> float:
    """Return the time from the first request to the last token."""
    return max(each.stamps[-1] for each in answers) - min(each.began for each in answers)


def _first(answers: Sequence[Answer], share: float) -> float:
    return 1e3 * percentile([each.stamps[0] - each.began for each in answers], share)


def _gap(answers: Sequence[Answer], share: float) -> float:
    gaps = [
        later - earlier
        for each in answers
        for earlier, later in zip(each.stamps, each.stamps[1:], strict=False)
    ]
    return 1e3 * percentile(gaps, share)


def _decode_rate(answers: Sequence[Answer]) -> float:
    """Return the tokens a second of the median answer, behind its first chunk."""
    return statistics.median(
        (each.tokens - 1) / each.decode_s
        if each.decode_s is not None
        else (each.tokens - each.counts[0]) / (each.stamps[-1] - each.stamps[0])
        for each in answers
    )


FIGURES: dict[str, Figure] = {
    "decode tok/s": lambda _, answers: _decode_rate(answers),
    "step ms": lambda _, answers: 1e3 / _decode_rate(answers),
    "output tok/s": lambda _, answers: sum(e.tokens for e in answers) / seconds(answers),
    "prompt tok/s": lambda work, answers: sum(map(len, work.prompts)) / seconds(answers),
    "req/s": lambda _, answers: len(answers) / seconds(answers),
    "TTFT p50 ms": lambda _, answers: _first(answers, 0.5),
    "TTFT p99 ms": lambda _, answers: _first(answers, 0.99),
    "ITL p50 ms": lambda _, answers: _gap(answers, 0.5),
    "ITL p99 ms": lambda _, answers: _gap(answers, 0.99),
}
