"""The requests the scheduler knows, and how many are in which state."""

from drumline.contract.arrays import IntArray
from drumline.core.errors import InvariantError
from drumline.core.hashing import extra_keys, page_digests
from drumline.scheduler.digests import NO_DIGESTS, Digests
from drumline.scheduler.events import RequestSpec
from drumline.scheduler.lifecycle import Move, State, after


class Request:
    """One request, from its submission until the plan that forgets it."""

    __slots__ = (
        "cached_tokens",
        "digests",
        "epoch",
        "extra",
        "host_tokens",
        "max_cached_tokens",
        "max_new_tokens",
        "passed",
        "planned",
        "priority",
        "promotion",
        "prompt_tokens",
        "published",
        "rid",
        "row",
        "sequence",
        "state",
        "tokens",
    )

    def __init__(
        self,
        spec: RequestSpec,
        sequence: int,
        granularity: int,
        state: State = State.SUBMITTED,
    ) -> None:
        """Take over a spec; `granularity` is 0 where no prefix is cached."""
        self.rid = spec.rid
        self.sequence = sequence
        self.tokens: IntArray = spec.tokens
        self.prompt_tokens = len(spec.tokens)
        self.max_new_tokens = spec.max_new_tokens
        self.priority = spec.priority
        self.max_cached_tokens = spec.max_cached_prefix_tokens
        self.extra = extra_keys(spec.cache_salt)
        self.digests = _digests(spec, granularity, self.extra) if granularity else NO_DIGESTS
        self.state = state
        self.row = 0
        self.epoch = 0
        self.cached_tokens = 0
        """Prompt tokens that its admission found in the cache."""
        self.host_tokens = 0
        """Those of them in pages that the host tier had, for some group."""
        self.passed = 0
        """Plans that admitted somebody who came later, while it waited."""
        self.planned = 0
        """Prompt tokens that are cached or planned."""
        self.promotion = 0
        """Up to where a page was cached for the groups that keep all, but not for the others."""
        self.published = 0
        """Prompt pages that were offered to the prefix index."""

    def cacheable_tokens(self, replayed: int) -> int:
        """Return the prompt tokens that may come from a cache, the last `replayed` never, nor
        the very last."""
        fed = max(replayed, 1)
        return max(min(self.prompt_tokens - fed, self.max_cached_tokens), 0)

    @property
    def root(self) -> bytes:
        """What stands for the page before the first one."""
        return b"root" + self.extra

    def __repr__(self) -> str:
        return (
            f"Request({self.rid!r}, {self.state.name.lower()}, row={self.row}, "
            f"prompt={self.planned}/{self.prompt_tokens})"
        )


def _digests(spec: RequestSpec, granularity: int, extra: bytes) -> Digests:
    return Digests(spec.page_digests or page_digests(spec.tokens, granularity, extra))


class RequestTable:
    """Requests by rid, and how many are in which state."""

    __slots__ = ("_by_rid", "_ended", "counts")

    def __init__(self) -> None:
        self._by_rid: dict[str, Request] = {}
        self._ended: list[Request] = []
        self.counts = [0] * len(State)

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    def get(self, rid: str) -> Request | None:
        return self._by_rid.get(rid)

    def add(self, request: Request) -> None:
        self._by_rid[request.rid] = request
        self.counts[request.state] += 1

    def move(self, request: Request, move: Move) -> None:
        """Change the request's state. Raises IllegalTransitionError, and changes nothing."""
        state = after(request.state, move, request.rid)
        self.counts[request.state] -= 1
        self.counts[state] += 1
        request.state = state
        if state is State.FINISHED:
            self._ended.append(request)

    def forget_ended(self) -> None:
        """Forget the requests that hold nothing any more; their rids are free again."""
        if not self._ended:
            return
        for request in self._ended:
            del self._by_rid[request.rid]
        self.counts[State.FINISHED] = 0
        self._ended.clear()

    def check(self) -> None:
        """Raise InvariantError unless the counts are those of the requests."""
        counts = [0] * len(State)
        for request in self._by_rid.values():
            counts[request.state] += 1
        if counts != self.counts:
            raise InvariantError(f"requests by state are {counts}, counted {self.counts}")

    def values(self) -> list[Request]:
        return list(self._by_rid.values())
