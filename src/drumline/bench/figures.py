"""What is made of answers: rates over all of them, and how their times are spread.

TTFT is the time to an answer's first token, ITL that between two pieces of it, TPOT that for
each token but the first, E2EL the whole answer's.
"""

from collections.abc import Sequence

from msgspec import Struct

_SPREAD = {"median": 0.5, "p90": 0.9, "p99": 0.99}


class Answer(Struct, frozen=True):
    """One request's answer, in seconds of one clock."""

    began_s: float
    """When it was sent."""
    stamps_s: list[float]
    """When the answer grew; at least once."""
    input_tokens: int
    output_tokens: int


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of `values` are not above, between two where need be."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summary(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the figures of at least one answer, under the names that other tools' have."""
    duration_s = max(a.stamps_s[-1] for a in answers) - min(a.began_s for a in answers)
    whole = [a.stamps_s[-1] - a.began_s for a in answers]
    taken, given = sum(a.input_tokens for a in answers), sum(a.output_tokens for a in answers)
    figures: dict[str, float] = {
        "completed": len(answers),
        "duration": round(duration_s, 3),
        "total_input_tokens": taken,
        "total_output_tokens": given,
        "request_throughput": round(len(answers) / duration_s, 3),
        "output_throughput": round(given / duration_s, 2),
        "total_token_throughput": round((taken + given) / duration_s, 2),
        "concurrency": round(sum(whole) / duration_s, 2),
    }
    times = {
        "ttft": [a.stamps_s[0] - a.began_s for a in answers],
        "tpot": [
            (a.stamps_s[-1] - a.stamps_s[0]) / (a.output_tokens - 1)
            for a in answers
            if a.output_tokens > 1
        ],
        "itl": [
            later - earlier
            for a in answers
            for earlier, later in zip(a.stamps_s, a.stamps_s[1:], strict=False)
        ],
        "e2el": whole,
    }
    for name, values in times.items():
        if values:
            figures[f"mean_{name}_ms"] = round(1e3 * sum(values) / len(values), 2)
            for which, share in _SPREAD.items():
                figures[f"{which}_{name}_ms"] = round(1e3 * percentile(values, share), 2)
    return figures


def table(figures: dict[str, float]) -> str:
    """Return a summary as lines for a terminal."""
    lines = [
        f"{figures['completed']} answers in {figures['duration']} s, "
        f"{figures['concurrency']} at a time",
        f"{figures['total_input_tokens']} tokens in, {figures['total_output_tokens']} out",
        f"{figures['request_throughput']} requests/s, {figures['output_throughput']} output tok/s, "
        f"{figures['total_token_throughput']} tok/s in all",
        f"{'ms':<6}" + "".join(f"{which:>11}" for which in ("mean", *_SPREAD)),
    ]
    for name in ("ttft", "tpot", "itl", "e2el"):
        if f"mean_{name}_ms" in figures:
            cells = (figures[f"{which}_{name}_ms"] for which in ("mean", *_SPREAD))
            lines.append(f"{name.upper():<6}" + "".join(f"{cell:>11.2f}" for cell in cells))
    return "\n".join(lines)
