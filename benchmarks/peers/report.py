"""Rows of what was measured, as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from benchmarks.peers.bars import Bar


class Row(Struct, frozen=True, kw_only=True):
    """One figure of one work: drumline's, a peer's, and what their ratio was to be."""

    work: str
    figure: str
    ours_is: str
    peer: str
    peer_is: str
    ours: float | None
    theirs: float | None
    bar: Bar | None
    failed: str | None = None
    """Why there is no figure of the peer."""
    runs: tuple[list[float], list[float]] = ([], [])
    """What the medians are of, drumline's and the peer's."""
    cpu: tuple[float | None, float | None] = (None, None)
    """Processor seconds that the work cost either side's processes."""

    @property
    def ratio(self) -> float | None:
        """drumline's figure as a multiple of the peer's."""
        return self.ours / self.theirs if self.ours is not None and self.theirs else None

    @property
    def cpu_ratio(self) -> float | None:
        """drumline's processor time as a multiple of the peer's.

        What a busy machine changes least, with one thread: several wait for each other by spinning.
        """
        ours, theirs = self.cpu
        return ours / theirs if ours and theirs else None

    @property
    def verdict(self) -> str:
        """`holds`, `misses`, `compared` where there is no bar, `failed` where there is no ratio."""
        if self.failed is not None or self.ratio is None:
            return "failed"
        if self.bar is None:
            return "compared"
        return "holds" if self.bar.holds(self.ratio) else "misses"


_TITLES = ("work", "figure", "drumline", "peer", "", "cpu", "ratio", "bar", "")


def table(rows: Sequence[Row]) -> str:
    """Return the rows in columns, numbers to the right."""
    cells = [_TITLES, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_TITLES))]
    lines = []
    for line in cells:
        words = [
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(words).rstrip())
    reasons = dict.fromkeys(
        f"{row.peer} ({row.peer_is}): {row.failed}" for row in rows if row.failed
    )
    return "\n".join([*lines, *reasons])


_RIGHT = {2, 4, 5, 6, 7}


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.work,
        row.figure,
        _number(row.ours),
        f"{row.peer} ({row.peer_is})",
        _number(row.theirs),
        "" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.bar is None else str(row.bar),
        row.verdict,
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain values, runs included."""
    return [
        {
            "work": row.work,
            "figure": row.figure,
            "drumline": row.ours,
            "drumline_is": row.ours_is,
            "peer": row.peer,
            "peer_is": row.peer_is,
            "peer_figure": row.theirs,
            "ratio": row.ratio,
            "cpu_s": row.cpu,
            "cpu_ratio": row.cpu_ratio,
            "bar": None if row.bar is None else str(row.bar),
            "verdict": row.verdict,
            "failed": row.failed,
            "drumline_runs": row.runs[0],
            "peer_runs": row.runs[1],
        }
        for row in rows
    ]
