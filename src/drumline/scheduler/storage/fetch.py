"""What storage does for one waiting request, as a table of stages.

A request whose prompt is not cached in either tier is asked for (`ASKING`), what was
found of it is brought to host memory (`FETCHING`), and there it is held for the request's
admission (`READY`). Every way out of that leads to an admission, with what there is.
"""

from enum import IntEnum

from msgspec import Struct

from drumline.contract.storage import StorageKey
from drumline.core.errors import InvariantError
from drumline.scheduler.index import NOBODY, IndexArray
from drumline.scheduler.requests import Request


class Stage(IntEnum):
    """How far a fetch is."""

    ASKING = 0
    """Storage is asked which of the prompt's pages it has."""
    FOUND = 1
    """It has some; the operation that reads them is not planned yet."""
    FETCHING = 2
    READY = 3
    """They are in host memory, held for the request, which waits for its admission."""
    OVER = 4


class Turn(IntEnum):
    """What can happen to a fetch."""

    HITS = 0
    MISSES = 1
    """Nothing of use was found, or read."""
    STARTED = 2
    """The operation that reads what was found is planned."""
    READ = 3
    GIVEN_UP = 4
    """The request needs it no more, or may wait for it no longer."""


STAGES: dict[tuple[Stage, Turn], Stage] = {
    (Stage.ASKING, Turn.HITS): Stage.FOUND,
    (Stage.ASKING, Turn.MISSES): Stage.OVER,
    (Stage.FOUND, Turn.STARTED): Stage.FETCHING,
    (Stage.FOUND, Turn.MISSES): Stage.OVER,
    (Stage.FETCHING, Turn.READ): Stage.READY,
    (Stage.FETCHING, Turn.MISSES): Stage.OVER,
    **{(stage, Turn.GIVEN_UP): Stage.OVER for stage in Stage if stage is not Stage.OVER},
}
"""A pair that is not in the table is illegal."""


class Fetch(Struct, eq=False):
    """One request's transaction with storage."""

    request: Request
    deadline_us: int
    op_id: int
    digests: list[bytes]
    """The pages from the prompt's start that it is about."""
    keys: tuple[StorageKey, ...]
    """What was asked for, or is being read."""
    last: StorageKey
    """The last of what was asked for: once that is cached, there is nothing to wait for."""
    stored: list[IndexArray]
    """By group, a cell for each block of the pages: 1 where storage has it."""
    held: IndexArray = NOBODY
    """Host blocks held until the admission."""
    stage: Stage = Stage.ASKING

    def turn(self, turn: Turn) -> None:
        """Move on. Raises InvariantError where the table has no such pair."""
        following = STAGES.get((self.stage, turn))
        if following is None:
            raise InvariantError(
                f"request {self.request.rid}: {turn.name} is illegal in stage {self.stage.name}"
            )
        self.stage = following
