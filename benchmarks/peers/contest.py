"""Measuring two engines in turn, so that a machine's better and worse minutes meet both."""

import statistics
from collections.abc import Callable, Sequence

from benchmarks.peers.bars import Bar, Contest
from benchmarks.peers.child import cpu_s
from benchmarks.peers.engine import Engine, PeerFailed
from benchmarks.peers.figures import FIGURES
from benchmarks.peers.report import Row
from benchmarks.peers.work import WARM, WORKS, Sizes, Work

Say = Callable[[str], None]
_CPU = "cpu s"
_Taken = dict[tuple[str, str], list[float]]


def run(
    contest: Contest, ours: Engine, theirs: Engine, runs: int, sizes: Sizes, say: Say
) -> list[Row]:
    """Start both, have them do each work `runs` times in turn, stop both; return the rows.

    Raises PeerFailed with nothing measured where the peer does not start. One that fails later
    fails in the rows of that work and of those after it. What drumline raises goes through.
    """
    rows: list[Row] = []
    failed: str | None = None
    try:
        theirs.start()
        theirs.measure(WARM(sizes, 0)[0])
        with _Ours():
            ours.start()
            ours.measure(WARM(sizes, 0)[0])
        for name in contest.works:
            bars = _bars_of(contest, name)
            taken: tuple[_Taken, _Taken] = ({}, {})
            if failed is None:
                say(f"  {name}")
                try:
                    for index in range(runs):
                        works = WORKS[name](sizes, index)
                        # Each goes first as often as the other.
                        _ask(works, index, (ours, theirs), taken, bars)
                except PeerFailed as error:
                    failed = str(error)
            rows.extend(_rows(contest, bars, taken, failed))
        return rows
    finally:
        ours.stop()
        theirs.stop()


def unmeasured(contest: Contest, reason: str) -> list[Row]:
    """Return the rows of a contest whose peer cannot be started, with the reason."""
    return _rows(contest, contest.bars, ({}, {}), reason)


class OursFailed(Exception):  # noqa: N818 - as PeerFailed
    """drumline could not be measured, which no other peer will change."""


class _Ours:
    """What fails in here is drumline's."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, PeerFailed):
            raise OursFailed(f"drumline {error}") from None


def _ask(
    works: Sequence[Work],
    index: int,
    engines: tuple[Engine, Engine],
    taken: tuple[_Taken, _Taken],
    bars: dict[str, dict[str, Bar | None]],
) -> None:
    for side in (0, 1) if index % 2 == 0 else (1, 0):
        for work in works:
            engine = engines[side]
            before = cpu_s(engine.pid)
            if side == 0:
                with _Ours():
                    answers = engine.measure(work)
            else:
                answers = engine.measure(work)
            taken[side].setdefault((work.name, _CPU), []).append(cpu_s(engine.pid) - before)
            for figure in bars.get(work.name, ()):
                value = FIGURES[figure](work, answers)
                taken[side].setdefault((work.name, figure), []).append(value)


def _bars_of(contest: Contest, name: str) -> dict[str, dict[str, Bar | None]]:
    return {
        work: bars
        for work, bars in contest.bars.items()
        if work == name or work.startswith(f"{name} ")
    }


def _rows(
    contest: Contest,
    bars: dict[str, dict[str, Bar | None]],
    taken: tuple[_Taken, _Taken],
    failed: str | None,
) -> list[Row]:
    return [
        Row(
            work=work,
            figure=figure,
            ours_is=str(contest.ours),
            peer=contest.peer,
            peer_is=str(contest.theirs),
            ours=_median(taken[0].get((work, figure))),
            theirs=None if failed else _median(taken[1].get((work, figure))),
            bar=bar,
            failed=failed,
            runs=(taken[0].get((work, figure), []), taken[1].get((work, figure), [])),
            cpu=(_median(taken[0].get((work, _CPU))), _median(taken[1].get((work, _CPU)))),
        )
        for work, figures in bars.items()
        for figure, bar in figures.items()
    ]


def _median(values: Sequence[float] | None) -> float | None:
    return statistics.median(values) if values else None
