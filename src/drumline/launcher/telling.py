"""What an operator is told while an engine starts."""

from collections.abc import Callable

from drumline.core.config import ParallelConfig
from drumline.launcher.ranks import OnStep

Say = Callable[[str], None]
"""Takes a line that an operator waits for."""


def steps_told(say: Say, parallel: ParallelConfig) -> OnStep:
    """Return what says each step of the start-up once, whichever rank is the first at it."""
    said = set()
    ranks = parallel.local_ranks
    who = f"rank {parallel.node}" if ranks == 1 else f"{ranks} ranks"

    def at(_: int, step: str) -> None:
        if step not in said:
            said.add(step)
            say(f"{who}: {step}")

    return at
