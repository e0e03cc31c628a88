"""The states of a request, and which move leads from which to which.

A pair that is not in the table is illegal: it raises and changes nothing.
"""

from enum import IntEnum

from drumline.core.config import Role
from drumline.scheduler.events import IllegalTransitionError


class State(IntEnum):
    """Where a request stands."""

    SUBMITTED = 0
    PREFILLING = 1
    """Part of its prompt is planned."""
    PREFILLED = 2
    """Its whole prompt is planned; no decode is."""
    DECODING = 3
    FINISHING = 4
    """It ended while results were outstanding; its blocks stay until the last one."""
    FINISHED = 5
    """It holds nothing; the next plan forgets it."""
    RETRACTED = 6
    """It was suspended: its image waits in host memory for room."""
    RESTORING = 7
    """It has a row and blocks again, which its image is being copied to."""
    PREFETCHING = 8
    """It waits for storage to say what it has of the prompt, or to bring it to host memory."""
    BOOTSTRAPPING = 9
    """Of a disaggregated engine: it waits until its peers have found each other."""
    AWAITING_RESULT = 10
    """Of a prefill engine: its whole prompt is planned, its first token is not known."""
    HANDING_OVER = 11
    """Of a prefill engine: the decode engine takes its prompt's cache over."""
    RECEIVING = 12
    """Of a decode engine: a prefill engine writes its prompt's cache into its blocks."""
    RETIRING = 13
    """It is over; its blocks stay until no peer touches them any more."""


class Move(IntEnum):
    """What can happen to a request."""

    CHUNK = 0
    """A prompt chunk was planned that does not reach the prompt's end."""
    LAST_CHUNK = 1
    DECODE = 2
    RESULT = 3
    """Tokens came back from a forward."""
    FINISH = 4
    """It ended by itself, with nothing outstanding."""
    FINISH_LATER = 5
    """It ended by itself, with results outstanding."""
    DRAINED = 6
    """Its last outstanding result came."""
    ABORT = 7
    RETRACT = 8
    RESTORE = 9
    """The way back was planned."""
    RESTORED = 10
    """The image was copied back."""
    ASK_STORAGE = 11
    """Storage was asked for its prompt's pages."""
    LEAVE_STORAGE = 12
    """It waits for storage no longer, whatever came of it."""
    BOOTSTRAP = 13
    LAST_CHUNK_TO_SEND = 14
    """The chunk that reaches the prompt's end was planned, of a prefill engine."""
    RESULT_IN = 15
    """Its first token is known."""
    RECEIVE = 16
    """Blocks were given to what a prefill engine is to send."""
    ARRIVE = 17
    """All of that is there."""
    SUCCEED = 18
    """The peer has what was handed over."""
    FAIL = 19
    """The transfer failed, and is over."""
    ABORT_LATER = 20
    """It is over while a peer may touch its blocks."""
    RETIRE = 21
    """No peer touches its blocks any more."""
    RESERVE = 22
    """Its next decode is to have more room."""


OVER = (State.FINISHING, State.FINISHED, State.RETIRING)
"""The states of requests that are over, and may hold something still."""

TRANSITIONS: dict[tuple[State, Move], State] = {
    (State.SUBMITTED, Move.CHUNK): State.PREFILLING,
    (State.SUBMITTED, Move.LAST_CHUNK): State.PREFILLED,
    (State.PREFILLING, Move.CHUNK): State.PREFILLING,
    (State.PREFILLING, Move.LAST_CHUNK): State.PREFILLED,
    (State.PREFILLED, Move.DECODE): State.DECODING,
    (State.PREFILLED, Move.RESULT): State.PREFILLED,
    (State.DECODING, Move.RESULT): State.DECODING,
    (State.FINISHING, Move.RESULT): State.FINISHING,
    (State.PREFILLED, Move.FINISH): State.FINISHED,
    (State.DECODING, Move.FINISH): State.FINISHED,
    (State.PREFILLED, Move.FINISH_LATER): State.FINISHING,
    (State.DECODING, Move.FINISH_LATER): State.FINISHING,
    (State.FINISHING, Move.DRAINED): State.FINISHED,
    (State.DECODING, Move.RESERVE): State.DECODING,
    (State.DECODING, Move.RETRACT): State.RETRACTED,
    (State.RETRACTED, Move.RESTORE): State.RESTORING,
    (State.RESTORING, Move.RESTORED): State.DECODING,
    (State.RETRACTED, Move.FINISH): State.FINISHED,
    (State.RESTORING, Move.FINISH): State.FINISHED,
    (State.SUBMITTED, Move.ASK_STORAGE): State.PREFETCHING,
    (State.PREFETCHING, Move.LEAVE_STORAGE): State.SUBMITTED,
    (State.BOOTSTRAPPING, Move.BOOTSTRAP): State.SUBMITTED,
    (State.SUBMITTED, Move.LAST_CHUNK_TO_SEND): State.AWAITING_RESULT,
    (State.PREFILLING, Move.LAST_CHUNK_TO_SEND): State.AWAITING_RESULT,
    (State.AWAITING_RESULT, Move.RESULT_IN): State.HANDING_OVER,
    (State.HANDING_OVER, Move.SUCCEED): State.FINISHED,
    (State.SUBMITTED, Move.RECEIVE): State.RECEIVING,
    (State.RECEIVING, Move.ARRIVE): State.PREFILLED,
    (State.PREFILLING, Move.ABORT_LATER): State.RETIRING,
    (State.AWAITING_RESULT, Move.ABORT_LATER): State.RETIRING,
    (State.HANDING_OVER, Move.ABORT_LATER): State.RETIRING,
    (State.RECEIVING, Move.ABORT_LATER): State.RETIRING,
    (State.RETIRING, Move.RETIRE): State.FINISHED,
    **{
        (state, move): State.FINISHED
        for state in State
        for move in (Move.ABORT, Move.FAIL)
        if state not in (State.FINISHED, State.RETIRING)
    },
}

TOUCHED_BY_PEERS: dict[Role, frozenset[State]] = {
    Role.PLAIN: frozenset(),
    # Chunks may be on their way while later ones are computed.
    Role.PREFILL: frozenset({State.PREFILLING, State.AWAITING_RESULT, State.HANDING_OVER}),
    Role.DECODE: frozenset({State.RECEIVING}),
}
"""In which states another engine may read or write a request's blocks."""


def after(state: State, move: Move, rid: str) -> State:
    """Return the state that `move` leads to. Raises IllegalTransitionError naming both."""
    following = TRANSITIONS.get((state, move))
    if following is None:
        raise IllegalTransitionError(f"request {rid}: {move.name} is illegal in state {state.name}")
    return following
