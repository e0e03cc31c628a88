"""Requests that wait for their grammars, and what the replica agrees about those.

Grammars compile on each rank by itself, as fast as it can, but a request goes on in the
same round on every rank: when its grammar is ready on all of them, or failed on one.
A request may end while it waits; it is forgotten then, and its grammar is not.
"""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from drumline.contract.grammar import (
    Compiling,
    Grammar,
    GrammarFailure,
    GrammarKey,
)
from drumline.contract.ports import GrammarCompiler, Group
from drumline.control.requests import (
    CLIENT_ERROR,
    NO_CAPACITY,
    Admitted,
    Ending,
    Reason,
    Request,
)
from drumline.core.errors import InvariantError, PeerError


class Waiter(Struct):
    """A request and the grammar it waits for."""

    admitted: Admitted
    key: GrammarKey
    grammar: Grammar | None = None
    """The compiled grammar, once this rank has it: it may be forgotten where it came from,
    while another rank still compiles."""


class Drained(Struct, frozen=True):
    """Who waits no longer: with a grammar, or with the end it comes to."""

    ready: list[tuple[Admitted, Grammar]] = []
    failed: list[tuple[Request, Ending]] = []


_Said = GrammarFailure | bool
"""What a rank says of a grammar: a failure, or whether it is ready."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_Said])
_NOBODY = Drained()


class Grammars:
    """The grammar queue of a replica's rank."""

    __slots__ = ("_compiler", "_queue", "_replica")

    def __init__(self, compiler: GrammarCompiler | None, replica: Group) -> None:
        """Wait for what `compiler` makes; None admits no grammar, which the ingress sees to."""
        self._compiler = compiler
        self._replica = replica
        self._queue: list[Waiter] = []

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def hold(self, admitted: Sequence[Admitted]) -> list[Admitted]:
        """Keep the requests that have a grammar, beginning its compile; return the others."""
        free = []
        for each in admitted:
            key = each.request.grammar
            if key is None or each.grammar is not None:
                free.append(each)
                continue
            if self._compiler is None:
                raise InvariantError(f"{each.request!r} has a grammar, and nothing compiles any")
            self._compiler.request(key)
            self._queue.append(Waiter(each, key))
        return free

    def cancel(self) -> list[Request]:
        """Forget who waits; returns them, so that they end. Their grammars go on compiling."""
        queue, self._queue = self._queue, []
        return [waiter.admitted.request for waiter in queue]

    def drain(self, lives: Callable[[Request], bool]) -> Drained:
        """Return who waits no longer, in order of arrival.

        Collective: over the replica, in rounds in which anybody waits; all members hold the
        same queue. `lives` says whether a request has not ended meanwhile.
        """
        if not self._queue or self._compiler is None:
            return _NOBODY
        queue = [waiter for waiter in self._queue if lives(waiter.admitted.request)]
        mine = [_looked_up(waiter, self._compiler) for waiter in queue]
        self._queue = []
        drained = Drained([], [])
        for waiter, said in zip(queue, self._agree(mine), strict=True):
            if isinstance(said, GrammarFailure):
                drained.failed.append((waiter.admitted.request, _ending(waiter.key, said)))
            elif said and waiter.grammar is not None:
                drained.ready.append((waiter.admitted, waiter.grammar))
            else:
                self._queue.append(waiter)
        return drained

    def _agree(self, mine: list[_Said]) -> list[_Said]:
        """Return what the replica makes of each grammar: its first failure, or if all have it."""
        if self._replica.size == 1:
            return mine
        agreed: list[_Said] = [True] * len(mine)
        for member, payload in enumerate(self._replica.all_gather(_encoder.encode(mine))):
            try:
                said = _decoder.decode(payload)
            except msgspec.DecodeError as error:
                raise PeerError(f"member {member} sent no grammar states: {error}") from None
            if len(said) != len(agreed):
                raise InvariantError(
                    f"{len(agreed)} requests wait for grammars here, {len(said)} at member {member}"
                )
            agreed = [_both(before, now) for before, now in zip(agreed, said, strict=True)]
        return agreed


def _looked_up(waiter: Waiter, compiler: GrammarCompiler) -> _Said:
    """Return what this rank says of a waiter's grammar, which stays with it once it is there."""
    if waiter.grammar is not None:
        return True
    state = compiler.state(waiter.key)
    if isinstance(state, GrammarFailure):
        return state
    if isinstance(state, Compiling):
        return False
    waiter.grammar = state
    return True


def _both(before: _Said, now: _Said) -> _Said:
    if isinstance(before, GrammarFailure):
        return before
    return now if isinstance(now, GrammarFailure) else before and now


def _ending(key: GrammarKey, failure: GrammarFailure) -> Ending:
    # A fault of ours has no status of a client's: the same request may work the next time.
    status = CLIENT_ERROR if failure.permanent else NO_CAPACITY if failure.busy else 0
    message = f"the {key.kind.value} grammar cannot be used: {failure.reason}"
    return Ending(Reason.ABORT, message, status)
