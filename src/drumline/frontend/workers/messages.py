"""What a worker and the owner of the engine's link send each other, and how it is framed.

The two are of one make and one machine, joined by a socket pair, so this is no wire that anybody
else speaks: a message is four bytes of length and a msgpack array.
"""

from typing import Any

import msgspec
from msgspec import Struct

from drumline.client.stream import Delta
from drumline.contract.outputs import Load
from drumline.core.errors import DrumlineError, PeerError, RequestError
from drumline.wire.request import TokenizedGenerateReqInput


class Serving(Struct, array_like=True, tag=True):
    """The worker answers connections."""


class Submit(Struct, array_like=True, tag=True):
    """A request for the engine."""

    request: TokenizedGenerateReqInput


class Cancel(Struct, array_like=True, tag=True):
    """Have the engine end a request, of whose end its worker wants to hear."""

    rid: str


class Leave(Struct, array_like=True, tag=True):
    """Nobody waits for a request any more."""

    rid: str


class Call(Struct, array_like=True, tag=True):
    """A control operation for every engine, by its name on the wire."""

    method: str
    args: list[Any]
    timeout_s: float


class Steer(Struct, array_like=True, tag=True):
    """An operation of `EngineControl`, by its name there."""

    name: str
    args: list[Any]
    options: dict[str, Any]


class Claim(Struct, array_like=True, tag=True):
    """Names that no other request may go by, and perhaps one of the places there are."""

    names: list[str]
    counted: bool


class Abort(Struct, array_like=True, tag=True):
    """End what goes by these names at any worker; None is everything."""

    names: list[str] | None


class Measure(Struct, array_like=True, tag=True):
    """Tell what was counted."""


class Asking(Struct, array_like=True, tag=True):
    """A question, answered under its number."""

    number: int
    question: Call | Steer | Claim | Abort | Measure


class Release(Struct, array_like=True, tag=True):
    """What was claimed under this number is free."""

    number: int


class Idle(Struct, array_like=True, tag=True):
    """The worker drains, and has nothing in flight any more."""


class Failure(Struct, array_like=True):
    """Why there is no answer; without a status another process is to blame."""

    message: str
    status: int | None = None
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: DrumlineError) -> "Failure":
        """Return what is told of `error`."""
        if isinstance(error, RequestError):
            return cls(error.message, error.status, error.param, error.code)
        return cls(str(error))

    def error(self) -> DrumlineError:
        """Return the error again."""
        if self.status is None:
            return PeerError(self.message)
        return RequestError(self.status, self.message, param=self.param, code=self.code)


class Answer(Struct, array_like=True, tag=True):
    """The answer to the other side's question of this number."""

    number: int
    value: Any = None
    failure: Failure | None = None


class Rows(Struct, array_like=True, tag=True):
    """What engines said of a worker's requests, an entry each."""

    rids: list[str]
    deltas: list[Delta]


class Standing(Struct, array_like=True, tag=True):
    """How engines fare, told several times a second."""

    loads: list[Load] = []
    in_flight: int = 0
    busy_s: float = 0.0
    last_output_age_s: float = 0.0
    serving_s: float = 0.0
    weight_version: str = ""
    weight_path: str | None = None
    weights_lost: str | None = None
    unloaded: bool = False


class Drain(Struct, array_like=True, tag=True):
    """Take nothing new; say when nothing is in flight."""


class Cover(Struct, array_like=True, tag=True):
    """Answer on the sockets of these workers too, which do not, and on no others but your own."""

    workers: list[int]


class AllIdle(Struct, array_like=True, tag=True):
    """No worker has anything in flight."""


class Gone(Struct, array_like=True, tag=True):
    """The engine is gone."""

    reason: str


FromWorker = Serving | Submit | Cancel | Leave | Asking | Release | Idle | Answer
FromOwner = Rows | Standing | Asking | Answer | Cover | Drain | AllIdle | Gone

decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_from_owner = msgspec.msgpack.Decoder(FromOwner).decode
