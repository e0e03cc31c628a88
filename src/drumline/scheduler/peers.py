"""What a disaggregated engine's scheduler learns of transfers, and what it owes its peers.

Prefill and decode engines get the same request, and wait until their peers have found each
other. The one computes the prompt and hands it over (`sending`), the other has blocks for
it and goes on from there (`receiving`). Whoever moves the cache tells how that ended, and
only once nobody touches the blocks any more: on that word alone blocks are freed.
"""

from collections.abc import Callable

from drumline.contract.arrays import IntArray
from drumline.core.config import Role
from drumline.core.errors import InvariantError
from drumline.scheduler.draft import Draft
from drumline.scheduler.events import (
    Bootstrapped,
    IllegalTransitionError,
    RemoteFailed,
    RemotePrefilled,
    RemoteSucceeded,
    Results,
)
from drumline.scheduler.lifecycle import TOUCHED_BY_PEERS, Move, State
from drumline.scheduler.receiving import Receiving
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.sending import Sending

PeerEvent = Bootstrapped | RemotePrefilled | RemoteSucceeded | RemoteFailed


class Peers:
    """One side of a disaggregated engine's transfers."""

    __slots__ = ("_bootstrapped", "_end", "_requests", "_touched", "receiving", "sending")

    def __init__(
        self,
        role: Role,
        requests: RequestTable,
        sending: Sending | None,
        receiving: Receiving | None,
        bootstrapped: Callable[[Request], None],
        end: Callable[[Request, Move], None],
    ) -> None:
        """`bootstrapped` learns who may be admitted now, `end` what ends a request."""
        self._touched = TOUCHED_BY_PEERS[role]
        self._requests = requests
        self.sending = sending
        self.receiving = receiving
        self._bootstrapped = bootstrapped
        self._end = end

    def apply(self, event: PeerEvent) -> Request | None:
        """Apply what happened to a transfer; returns the request that may decode now, if any.

        Raises IllegalTransitionError, and changes nothing, where the request's state cannot
        take it.
        """
        request = self._requests.get(event.rid)
        if isinstance(event, RemotePrefilled) and event.token < 0:
            raise InvariantError(f"request {event.rid}: its prompt arrived without a first token")
        if request is None or request.state is State.FINISHED:
            return None
        retiring = request.state is State.RETIRING
        match event:
            case Bootstrapped():
                if request.state is State.BOOTSTRAPPING:
                    self._requests.move(request, Move.BOOTSTRAP)
                    self._bootstrapped(request)
            case RemotePrefilled():
                if retiring:
                    self._end(request, Move.RETIRE)
                elif request.state in (State.BOOTSTRAPPING, State.SUBMITTED, State.RECEIVING):
                    return self._arrive(request, event.token)
            case RemoteSucceeded():
                self._end(request, Move.RETIRE if retiring else Move.SUCCEED)
            case RemoteFailed():
                self._end(request, Move.RETIRE if retiring else Move.FAIL)
        return None

    def _arrive(self, request: Request, token: int) -> Request:
        if self.receiving is None or request.state is not State.RECEIVING:
            raise IllegalTransitionError(
                f"request {request.rid}: its prompt arrived in state {request.state.name}"
            )
        self.receiving.arrive(request, token)
        return request

    def touch(self, request: Request) -> bool:
        """Whether a peer may read or write the request's blocks."""
        return request.state in self._touched

    def commit(self, results: Results) -> None:
        """Take from results what is handed over with a prompt."""
        if self.sending is not None:
            self.sending.commit(results)

    def plan(self, draft: Draft) -> None:
        """Hand over what can be."""
        if self.sending is not None:
            self.sending.plan(draft)

    def first_tokens(self, rows: IntArray) -> IntArray | None:
        """Return what decode rows feed that was not sampled here; None if all was."""
        return None if self.receiving is None else self.receiving.first_tokens(rows)

    def leave(self, request: Request) -> None:
        """Forget a request that ended."""
        for side in (self.sending, self.receiving):
            if side is not None:
                side.leave(request)

    def check(self) -> None:
        """Raise InvariantError unless who is handed over or arrived is where it should be."""
        for side in (self.sending, self.receiving):
            if side is not None:
                side.check()
