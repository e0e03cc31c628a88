"""The link to a group of engines, as far as this room uses it."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from drumline.client.stream import Stream
from drumline.contract.outputs import Load
from drumline.wire.output import ControlReplySlim
from drumline.wire.request import TokenizedGenerateReqInput


class EngineLink(Protocol):
    """What `client.EngineClient` is to a lone server, and `workers.SharedLink` to a worker."""

    closed: asyncio.Event
    """Set once nothing works any more."""
    weight_version: str
    weight_path: str | None
    """The checkpoint they were last loaded from, since the start."""
    weights_lost: str | None
    """Why no weights serve any more, if so."""
    unloaded: bool
    """Whether an operator had the weights dropped, and others are still to be loaded."""

    @property
    def engines(self) -> int: ...

    @property
    def loads(self) -> Sequence[Load]: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def busy_s(self) -> float: ...

    @property
    def last_output_age_s(self) -> float: ...

    def submit(self, request: TokenizedGenerateReqInput) -> Stream: ...

    def cancel(self, stream: Stream) -> None: ...

    async def call(
        self, method: str, *args: Any, timeout_s: float
    ) -> Sequence[ControlReplySlim]: ...
