"""One request's outputs, on their way to whoever asked for them.

What a consumer has not fetched yet is kept as one delta that grows, so that a slow
consumer costs one object, however many rounds pass.
"""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from msgspec import Struct

from drumline.core.errors import PeerError

T = TypeVar("T")


class Delta(Struct, array_like=True):
    """What a request produced since the last delta.

    `finished_reason` is empty while the request runs, else `stop`, `length` or
    `abort`, and `details` may say more (`message`, `status_code`). `completion_tokens`
    is a running total. The log probability lists have an entry for each of `token_ids`
    where they were asked for, else they are empty; behind the likeliest, `top_logprobs` have
    the ids asked for by name. `input_logprobs` come once, for the prompt, the first entry None.
    """

    token_ids: list[int]
    finished_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: Sequence[float] = ()
    logprob_ids: Sequence[int] = ()
    top_logprobs: Sequence[list[float] | None] = ()
    top_logprob_ids: Sequence[list[int] | None] = ()
    input_logprobs: Sequence[float | None] = ()
    input_logprob_ids: Sequence[int] = ()
    input_top_logprobs: Sequence[list[float] | None] = ()
    input_top_logprob_ids: Sequence[list[int] | None] = ()
    details: dict[str, Any] | None = None
    weight_version: str = ""
    """With a finished reason: what the weights were called that had served until then."""


def merged(earlier: Delta, later: Delta) -> Delta:
    """Return `earlier`, grown by `later`."""
    earlier.token_ids += later.token_ids
    earlier.finished_reason = later.finished_reason
    earlier.prompt_tokens = later.prompt_tokens
    earlier.completion_tokens = later.completion_tokens
    earlier.cached_tokens = later.cached_tokens
    if later.logprobs or later.input_logprobs:
        earlier.logprobs = _joined(earlier.logprobs, later.logprobs)
        earlier.logprob_ids = _joined(earlier.logprob_ids, later.logprob_ids)
        earlier.top_logprobs = _joined(earlier.top_logprobs, later.top_logprobs)
        earlier.top_logprob_ids = _joined(earlier.top_logprob_ids, later.top_logprob_ids)
        earlier.input_logprobs = _joined(earlier.input_logprobs, later.input_logprobs)
        earlier.input_logprob_ids = _joined(earlier.input_logprob_ids, later.input_logprob_ids)
        earlier.input_top_logprobs = _joined(earlier.input_top_logprobs, later.input_top_logprobs)
        earlier.input_top_logprob_ids = _joined(
            earlier.input_top_logprob_ids, later.input_top_logprob_ids
        )
    if later.details is not None:
        earlier.details = later.details
    earlier.weight_version = later.weight_version
    return earlier


def _joined(earlier: Sequence[T], later: Sequence[T]) -> Sequence[T]:
    """Return both; what is not empty is a list of a batch, which nobody else holds."""
    if not later or not earlier:
        return earlier or later
    both = cast("list[T]", earlier)
    both += later
    return both


class Stream:
    """An async iterator over a request's deltas, for one consumer.

    Iteration ends behind the delta that has a finished reason, or raises PeerError
    when the engine is gone. Leave it early with `abort`, or use the stream as an
    async context manager, which aborts what has not ended.

    Thread: the event loop's.
    """

    __slots__ = ("_abort", "_ended", "_failure", "_pending", "_waiter", "engine_index", "rid")

    def __init__(self, rid: str, engine_index: int, abort: Callable[["Stream"], None]) -> None:
        self.rid = rid
        self.engine_index = engine_index
        self._abort = abort
        self._pending: Delta | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._failure: str | None = None

    @property
    def ended(self) -> bool:
        """No further output will arrive: finished, aborted or failed."""
        return self._ended

    def abort(self) -> None:
        """Tell the engine that nobody waits for this; does nothing once it ended."""
        if not self._ended:
            self._pending = None
            self.end()
            self._abort(self)

    def push(self, delta: Delta) -> None:
        """Add a row of the engine's output. Called by the client."""
        pending = self._pending
        self._pending = delta if pending is None else merged(pending, delta)
        if delta.finished_reason:
            self._ended = True
        self._wake()

    def fail(self, reason: str) -> None:
        """End the stream because the engine is gone. Called by the client."""
        self._failure = reason
        self.end()

    def end(self) -> None:
        """Let the consumer run out of deltas."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while self._pending is None:
            if self._failure is not None:
                raise PeerError(self._failure)
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta, self._pending = self._pending, None
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def __repr__(self) -> str:
        state = "failed" if self._failure else "ended" if self._ended else "open"
        return f"Stream({self.rid}, engine {self.engine_index}, {state})"
