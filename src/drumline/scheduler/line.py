"""The requests that wait for their first chunk, and in which order they are looked at.

Higher priority first where the policy asks for it, and within a priority in order of
submission. A request that later ones were admitted before in `patience` plans goes
first, and nobody is admitted behind it until it is in: so neither its size nor its
priority makes it wait for ever. Plans are counted, not seconds, so every rank agrees.
It does not know what a request needs.
"""

from collections.abc import Iterator, Sequence

from drumline.core.errors import InvariantError
from drumline.scheduler.requests import Request


class Line:
    """Waiting requests in order; `tokens` is the length of all their prompts.

    Those that stand aside wait for something else first. They count as waiting, and come
    back to their place in order of submission.
    """

    __slots__ = ("_aged", "_aside", "_classes", "_order", "_patience", "_priorities", "tokens")

    def __init__(self, *, priorities: bool, patience: int | None) -> None:
        self._priorities = priorities
        self._patience = patience
        self._classes: dict[int, dict[str, Request]] = {}
        """By priority, then by rid in order of submission."""
        self._order: list[int] = []
        """The priorities somebody waits with, the highest first."""
        self._aged: dict[str, Request] = {}
        self._aside: dict[str, Request] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._aged) + len(self._aside) + sum(map(len, self._classes.values()))

    def __bool__(self) -> bool:
        return bool(self._classes or self._aged)

    def __iter__(self) -> Iterator[Request]:
        yield from self._aged.values()
        for priority in self._order:
            yield from self._classes[priority].values()

    def __contains__(self, request: Request) -> bool:
        rid = request.rid
        if rid in self._aged or rid in self._aside:
            return True
        return rid in self._classes.get(self._key(request), ())

    def _key(self, request: Request) -> int:
        return request.priority if self._priorities else 0

    def add(self, request: Request) -> None:
        """Line up a request behind those of its priority that were submitted before it."""
        self.tokens += request.prompt_tokens
        self._place(request)

    def add_aside(self, request: Request) -> None:
        """Count a request as waiting that does not stand in line yet."""
        self.tokens += request.prompt_tokens
        self._aside[request.rid] = request

    def _place(self, request: Request) -> None:
        key = self._key(request)
        if key not in self._classes:
            self._classes[key] = {}
            self._order = sorted(self._classes, reverse=True)
        mine = self._classes[key]
        behind = bool(mine) and request.sequence < next(reversed(mine.values())).sequence
        mine[request.rid] = request
        if behind:
            ordered = sorted(mine.values(), key=_by_sequence)
            self._classes[key] = {one.rid: one for one in ordered}

    def remove(self, request: Request) -> None:
        """Take a request out that waits."""
        rid = request.rid
        if self._aged.pop(rid, None) is None and self._aside.pop(rid, None) is None:
            self._take(request)
        self.tokens -= request.prompt_tokens

    def set_aside(self, request: Request) -> None:
        """Have a request of the line wait for something else."""
        if self._aged.pop(request.rid, None) is None:
            self._take(request)
        self._aside[request.rid] = request

    def bring_back(self, request: Request) -> None:
        """Have a request stand in line again."""
        del self._aside[request.rid]
        self._place(request)

    def _take(self, request: Request) -> None:
        key = self._key(request)
        mine = self._classes[key]
        del mine[request.rid]
        if not mine:
            del self._classes[key]
            self._order.remove(key)

    def aged(self, request: Request) -> bool:
        """Whether nobody may be admitted before the request any more."""
        return request.rid in self._aged

    def passed_by(self, admitted: Sequence[Request]) -> None:
        """Count a plan for everybody who waits and was submitted before one of `admitted`."""
        if self._patience is None:
            return
        last = max(request.sequence for request in admitted)
        ripe = []
        for request in self:
            if request.sequence < last:
                request.passed += 1
                if request.passed >= self._patience and request.rid not in self._aged:
                    ripe.append(request)
        for request in sorted(ripe, key=_by_sequence):
            self._take(request)
            self._aged[request.rid] = request

    def ahead_of(self, request: Request) -> int:
        """Return how many are looked at before the request; for explanations."""
        for ahead, other in enumerate(self):
            if other is request:
                return ahead
        return len(self)

    def check(self, submitted: set[str], aside: set[str]) -> None:
        """Raise InvariantError unless exactly the submitted requests wait, `aside` or not."""
        waiting = list(self)
        if {request.rid for request in waiting} != submitted or len(waiting) != len(submitted):
            raise InvariantError("the waiting requests are not those submitted")
        if self._aside.keys() != aside:
            raise InvariantError("a request stands aside from the line that does not have to")
        waiting += self._aside.values()
        if self.tokens != sum(request.prompt_tokens for request in waiting):
            raise InvariantError(f"{self.tokens} tokens count as waiting, others do")
        if self._order != sorted(self._classes, reverse=True) or not all(self._classes.values()):
            raise InvariantError("the priorities that wait are out of order")
        for mine in self._classes.values():
            sequences = [request.sequence for request in mine.values()]
            if sequences != sorted(sequences):
                raise InvariantError("requests of one priority are out of order")


def _by_sequence(request: Request) -> int:
    return request.sequence
