"""What the operator is told while a server starts."""

from drumline.core.config import ParallelConfig
from drumline.launcher.telling import steps_told


def told(ranks: int, *reports: tuple[int, str]) -> list[str]:
    lines: list[str] = []
    at = steps_told(lines.append, ParallelConfig(data_parallel_size=ranks))
    for rank, step in reports:
        at(rank, step)
    return lines


def test_a_rank_that_is_alone_is_followed_step_by_step():
    assert told(1, (0, "imports"), (0, "loading")) == ["rank 0: imports", "rank 0: loading"]


def test_of_several_ranks_each_step_is_told_once_by_the_first_that_is_at_it():
    reports = [(1, "imports"), (0, "imports"), (0, "loading"), (1, "loading"), (0, "frontend")]
    assert told(2, *reports) == ["2 ranks: imports", "2 ranks: loading", "2 ranks: frontend"]
