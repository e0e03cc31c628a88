"""The mesh's twin in one thread: ranks are greenlets that switch at exchanges only.

Each rank runs an ordinary synchronous function. It gives way when it enters an exchange, and
goes on once every member of the group is in the same one; which of the ranks that can go on
does so next is drawn from a seed, so that a seed names a schedule and every run of it is the
same. A rank in another exchange, or one that ended while others wait for it, is named at once;
ranks that wait for each other in a ring are named as soon as nobody can go on.

As with the mesh, one failure ends all: every exchange raises from then on. It does not know
time, and cannot lose a message or slow a rank down; who simulates that does so above it.
"""

import random
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeVar, cast

from greenlet import getcurrent, greenlet

from drumline.collective import frame
from drumline.collective.frame import Operation
from drumline.contract.ports import Reduce
from drumline.core.errors import DrumlineError, InvariantError, PeerError

_Result = TypeVar("_Result")
_NAMED = 8


def run_ranks(
    size: int, main: Callable[["InProcessMesh"], _Result], seed: int = 0
) -> list[_Result]:
    """Run `main` on `size` ranks until all have returned; return what they did, in rank order.

    An exception that a rank did not catch stops the others with PeerError in their exchanges,
    and is raised here, with a note that names the rank; the first one counts. Ranks that are
    not in step get InvariantError, with the same text on each.
    """
    return cast("list[_Result]", _World(size, main, random.Random(seed)).run())


class InProcessMesh:
    """One rank's end of the twin; the same interface as `Mesh` has for exchanges."""

    __slots__ = ("_world", "index", "size")

    def __init__(self, index: int, world: "_World") -> None:
        self.index = index
        self.size = world.size
        self._world = world

    def group(self, members: Sequence[int], name: str = "ranks") -> "InProcessGroup":
        """Return the group of these ranks, as `Mesh.group` does."""
        return InProcessGroup(self.index, self._world.meeting(self.index, members, name))

    def fail(self, reason: str) -> None:
        """Stop every rank: their exchanges, also those they are in, raise PeerError."""
        self._world.fail(PeerError(f"rank {self.index} stopped: {reason}"))


class InProcessGroup:
    """A fixed set of ranks that exchange in step: a `Group`."""

    __slots__ = ("_meeting", "_rank", "_sequence", "index", "size")

    def __init__(self, rank: int, meeting: "_Meeting") -> None:
        self.index = meeting.places[rank]
        self.size = len(meeting.places)
        self._rank = rank
        self._meeting = meeting
        self._sequence = 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every member's payload, in member order."""
        return list(self._exchange(Operation.ALL_GATHER, 0, payload, _gathered))

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Return every member's row of 64-bit ints, in member order; all of one length."""
        packed = self._packed(row)
        return list(map(list, self._exchange(Operation.ALL_GATHER_INTS, 0, packed, frame.rows)))

    def all_reduce(self, values: Sequence[int], how: Reduce) -> list[int]:
        """Return the element-wise reduction of every member's 64-bit values."""
        return list(
            self._exchange(
                Operation.ALL_REDUCE,
                frame.REDUCTIONS[how],
                self._packed(values),
                lambda parts: frame.reduced(frame.rows(parts), how),
            )
        )

    def broadcast(self, root: int, payload: bytes) -> bytes:
        """Return the payload of member `root`; what the others pass is ignored."""
        if not 0 <= root < self.size:
            error = InvariantError(f"member {root} of {self.size} cannot be a broadcast's root")
            self._meeting.world.fail(error)
            raise error
        return self._exchange(Operation.BROADCAST, root, payload, lambda parts: parts[root])

    def _packed(self, row: Sequence[int]) -> bytes:
        try:
            return frame.packed(row)
        except InvariantError as error:
            self._meeting.world.fail(error)
            raise

    def _exchange(
        self,
        operation: Operation,
        detail: int,
        part: bytes,
        combine: Callable[[Sequence[bytes]], _Result],
    ) -> _Result:
        sequence = self._sequence
        self._sequence = sequence + 1
        exchange = (operation, detail, sequence)
        return cast("_Result", self._meeting.enter(self._rank, exchange, part, combine))


def _gathered(parts: Sequence[bytes]) -> Sequence[bytes]:
    return parts


class _Meeting:
    """Where a group's members meet: the exchange that is filling up, and who is in it."""

    __slots__ = ("_exchange", "_label", "_parts", "ended", "places", "waiting", "world")

    def __init__(self, world: "_World", members: Sequence[int], label: bytes) -> None:
        self.world = world
        self.places = {rank: place for place, rank in enumerate(members)}
        self.waiting: list[int] = []
        self.ended: int | None = None
        self._label = label
        self._exchange: tuple[Operation, int, int] | None = None
        self._parts: list[bytes] = [b""] * len(members)

    def describe(self) -> str:
        """Return the exchange in words: `all-gather 7 of replica[0-3]`."""
        return self._words(self._exchange) if self._exchange else self._label.decode()

    def _words(self, exchange: tuple[Operation, int, int]) -> str:
        operation, detail, sequence = exchange
        return frame.describe(frame.tag(operation, detail, self._label), sequence)

    def enter(
        self,
        rank: int,
        exchange: tuple[Operation, int, int],
        part: bytes,
        combine: Callable[[Sequence[bytes]], object],
    ) -> object:
        """Give `part` to an exchange; return what it comes to once every member is in it."""
        if self.world.failure is not None:
            raise _again(self.world.failure)
        if self._exchange is None:
            self._exchange = exchange
        elif self._exchange != exchange:
            self._fail(
                f"rank {self.waiting[0]} is in {self.describe()}, "
                f"but rank {rank} is in {self._words(exchange)}"
            )
        if self.ended is not None:
            self._fail(f"rank {rank} is in {self.describe()}, but rank {self.ended} has ended")
        self._parts[self.places[rank]] = part
        self.waiting.append(rank)
        if len(self.waiting) == len(self.places):
            # The parts belong to this exchange alone: a fast rank may enter the next one while
            # others have not looked at the result yet.
            waiting, parts = self.waiting, self._parts
            self.waiting, self._parts = [], [b""] * len(parts)
            self._exchange = None
            try:
                result = combine(parts)
            except InvariantError as error:
                self.world.fail(error)
                raise
            self.world.resume(waiting, result)
        return self.world.give_way(rank, self)

    def left_by(self, rank: int) -> None:
        """Note that a member's function has returned; nobody may wait for it any more."""
        self.ended = rank
        if self.waiting:
            text = f"rank {self.waiting[0]} is in {self.describe()}, but rank {rank} has ended"
            self.world.fail(InvariantError(text))

    def _fail(self, text: str) -> None:
        error = InvariantError(text)
        self.world.fail(error)
        raise error


def _again(error: DrumlineError) -> DrumlineError:
    """Return the same error for one more rank, with a traceback of its own."""
    return type(error)(*error.args)


class _World:
    """All ranks, and which of them can go on."""

    def __init__(
        self, size: int, main: Callable[[InProcessMesh], object], rng: random.Random
    ) -> None:
        self.size = size
        self.failure: DrumlineError | None = None
        self._main = main
        self._rng = rng
        self._hub = getcurrent()
        self._ranks = [greenlet(self._run_rank, self._hub) for _ in range(size)]
        self._running = size
        self._results: list[object] = [None] * size
        self._uncaught: Exception | None = None
        self._meetings: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
        self._joined: list[list[_Meeting]] = [[] for _ in range(size)]
        # Ranks that can go on, and what their exchange came to.
        self._ready = list(range(size))
        self._given: dict[int, object] = {}
        # Ranks that cannot, and where they wait.
        self._blocked: dict[int, _Meeting] = {}

    def meeting(self, rank: int, members: Sequence[int], name: str) -> _Meeting:
        """Return where the group of this name and these members meets."""
        # Looked up before anything is checked: thousands of ranks name the same thousands.
        key = (name, tuple(members))
        meeting = self._meetings.get(key)
        if meeting is None:
            frame.check_members(members, self.size)
            meeting = self._meetings[key] = _Meeting(self, members, frame.label(name, members))
        if rank not in meeting.places:
            raise InvariantError(f"rank {rank} is no member of {meeting.describe()}")
        if meeting in self._joined[rank]:
            raise InvariantError(f"rank {rank} has a group {meeting.describe()} already")
        self._joined[rank].append(meeting)
        return meeting

    def resume(self, ranks: Sequence[int], result: object) -> None:
        """Let ranks that wait, or are about to, go on with a result."""
        for rank in ranks:
            self._blocked.pop(rank, None)
            self._given[rank] = result
        self._ready += ranks

    def give_way(self, rank: int, meeting: _Meeting) -> object:
        """Leave the thread to other ranks; return the exchange's result when it is there."""
        if rank not in self._given:
            self._blocked[rank] = meeting
        self._hub.switch()
        if rank in self._given:
            return self._given.pop(rank)
        assert self.failure is not None
        raise _again(self.failure)

    def fail(self, error: DrumlineError) -> None:
        """End every exchange, entered or yet to come, with this error; the first one counts."""
        if self.failure is None:
            self.failure = error
            self._ready += self._blocked
            self._blocked.clear()

    def run(self) -> list[object]:
        """Run every rank to its end."""
        while self._running:
            if not self._ready:
                self.fail(InvariantError(self._lock_up()))
            rank = self._drawn()
            self._ranks[rank].switch(rank)
        if self._uncaught is not None:
            raise self._uncaught
        return self._results

    def _run_rank(self, rank: int) -> None:
        try:
            self._results[rank] = self._main(InProcessMesh(rank, self))
        except Exception as error:
            error.add_note(f"raised on rank {rank} of {self.size}")
            self._uncaught = self._uncaught or error
            self.fail(PeerError(f"rank {rank} stopped: {type(error).__name__}: {error}"))
        self._running -= 1
        for meeting in self._joined[rank]:
            meeting.left_by(rank)

    def _drawn(self) -> int:
        """Take one of the ranks that can go on."""
        place = int(self._rng.random() * len(self._ready))
        last = self._ready.pop()
        if place == len(self._ready):
            return last
        rank, self._ready[place] = self._ready[place], last
        return rank

    def _lock_up(self) -> str:
        """Return who waits where, when nobody can go on."""
        waits = [
            f"rank {rank} is in {meeting.describe()}"
            for rank, meeting in sorted(self._blocked.items(), key=itemgetter(0))
        ]
        more = f"; and {len(waits) - _NAMED} more" if len(waits) > _NAMED else ""
        return f"every rank waits for another: {'; '.join(waits[:_NAMED])}{more}"
