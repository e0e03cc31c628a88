"""Which engines of a group have registered, and how what they send is to be read.

It knows no socket. Thread: the event loop's.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from drumline.wire.codec import Buffer, MalformedFrameError
from drumline.wire.handshake import Registration, engine_of
from drumline.wire.layout import decode_output, output_decoder
from drumline.wire.output import Output

log = logging.getLogger(__name__)


class Roll:
    """The engines that a group of `engines` has, by their indices, as they come."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._registered: dict[int, Registration] = {}
        self._by_connection: dict[int, int] = {}
        self.complete = asyncio.Event()
        """Set once all are there."""
        self.decode: Callable[[Buffer], Output] = decode_output
        """Reads what they send, as they declared it."""

    @property
    def first(self) -> Registration:
        """What the first engine registered with, once all did."""
        return self._registered[0]

    @property
    def missing(self) -> list[int]:
        """The engines that have not registered."""
        return [index for index in range(self._engines) if index not in self._registered]

    def known(self, engine: int) -> int:
        """Return an index that an engine names. Raises MalformedFrameError for no engine's."""
        if not 0 <= engine < self._engines:
            raise MalformedFrameError(f"engine {engine} is none of the {self._engines} awaited")
        return engine

    def sender(self, identity: Buffer, frames: Sequence[object]) -> int:
        """Return which engine sent a message, which is one frame. Raises MalformedFrameError."""
        if len(frames) != 1:
            raise MalformedFrameError(f"one frame makes the message, {len(frames)} came")
        return self.known(engine_of(identity))

    def enter(self, engine: int, registration: Registration, connection: int) -> str | None:
        """Note an engine at a connection; returns why the group is of no use with it, if so."""
        first = next(iter(self._registered.values()), registration)
        try:
            self.decode = output_decoder(registration.positional_layouts)
        except MalformedFrameError as error:
            return str(error)
        if registration.positional_layouts != first.positional_layouts:
            return "engines of one group declare different field orders"
        self._registered[engine] = registration
        self._by_connection[connection] = engine
        log.info("engine %d registered: %s", engine, registration.instance_id or "unnamed model")
        if not self.missing:
            self.complete.set()
        return None

    def at(self, connection: int) -> int | None:
        """Return which engine a connection is of, if one registered over it."""
        return self._by_connection.get(connection)
