"""A worker's end: engines, their operator and the other workers, all behind one channel.

To the routes it looks as the engine link of a lone server does. Thread: the event loop's.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from msgspec import Raw
from prometheus_client import CollectorRegistry

from drumline.client.engine_client import on_the_wire
from drumline.client.stream import Stream
from drumline.contract.outputs import Load
from drumline.contract.profile import ProfileAsked
from drumline.core.errors import PeerError, RequestError
from drumline.frontend.engine_control import Outcome
from drumline.frontend.live_requests import LiveRequests
from drumline.frontend.serve import Covered
from drumline.frontend.web.errors import as_request_error
from drumline.frontend.workers.channel import Channel
from drumline.frontend.workers.counted import families_of
from drumline.frontend.workers.messages import (
    Abort,
    AllIdle,
    Asking,
    Call,
    Cancel,
    Claim,
    Cover,
    Drain,
    FromOwner,
    Gone,
    Idle,
    Leave,
    Measure,
    Release,
    Rows,
    Serving,
    Standing,
    Steer,
    Submit,
    decode_from_owner,
)
from drumline.wire.output import ControlReplySlim
from drumline.wire.progress import Progress
from drumline.wire.request import TokenizedGenerateReqInput

log = logging.getLogger(__name__)

_ASK_S = 5.0
_MARGIN_S = 5.0
"""What the owner gets beyond what it allows the engine, so that its own word comes first."""


class SharedLink:
    """The engines, as far as a worker sees them."""

    def __init__(self, engines: int, control_s: float, *, limited: bool = False) -> None:
        """Speak of `engines` engines, whose operations take `control_s` at most.

        `limited` says that requests are counted, as there is a most.
        """
        self._engines = engines
        self._limited = limited
        self._streams: dict[str, Stream] = {}
        self._standing = Standing()
        self._heard_at = 0.0
        self.channel: Channel[FromOwner] = Channel(decode_from_owner, self._heard)
        self.closed = asyncio.Event()
        """Set once engine or owner is gone; nothing works from then on."""
        self.drain = asyncio.Event()
        """Set once this worker is to take nothing new."""
        self.covered = Covered()
        """The workers for which this one answers."""
        self.all_idle = asyncio.Event()
        """Set once no worker has anything in flight."""
        self.weight_version = "default"
        self.weight_path: str | None = None
        self.weights_lost: str | None = None
        self.unloaded = False
        self.control = SharedControl(self, control_s)
        self._live: LiveRequests | None = None
        self._registry: CollectorRegistry | None = None

    async def attach(self, end: socket.socket) -> None:
        """Speak to the owner through `end`."""
        await self.channel.attach(end)
        self._watching = asyncio.create_task(self._watch())

    def serving(self) -> None:
        """Tell the owner that connections are answered."""
        self.channel.send(Serving())

    def desk(self, live: LiveRequests, registry: CollectorRegistry) -> "SharedDesk":
        """Return what the workers agree on; `live` and `registry` are this one's share."""
        self._live, self._registry = live, registry
        return SharedDesk(self, live, limited=self._limited)

    # --- what `EngineLink` asks for

    @property
    def engines(self) -> int:
        return self._engines

    @property
    def loads(self) -> Sequence[Load]:
        return self._standing.loads

    @property
    def in_flight(self) -> int:
        return self._standing.in_flight

    @property
    def busy_s(self) -> float:
        standing = self._standing
        return standing.busy_s + self.told_ago_s if standing.in_flight or self._streams else 0.0

    @property
    def last_output_age_s(self) -> float:
        return self._standing.last_output_age_s + self.told_ago_s

    @property
    def standing(self) -> Standing:
        """What the owner last told."""
        return self._standing

    @property
    def told_ago_s(self) -> float:
        """Seconds since then; an owner that hangs tells nothing."""
        return asyncio.get_running_loop().time() - self._heard_at

    def submit(self, request: TokenizedGenerateReqInput) -> Stream:
        if self.closed.is_set():
            raise PeerError("the engine is gone")
        rid = str(request.rid)
        if rid in self._streams:
            raise RequestError(409, f"a request with the id {rid!r} is in flight", param="rid")
        with on_the_wire():
            self.channel.send(Submit(request))
        stream = self._streams[rid] = Stream(rid, 0, self._left)
        return stream

    def cancel(self, stream: Stream) -> None:
        if not stream.ended:
            self.channel.send(Cancel(stream.rid))

    async def call(self, method: str, *args: Any, timeout_s: float) -> Sequence[ControlReplySlim]:
        question = Call(method, list(args), timeout_s)
        told = await self.ask(question, timeout_s + _MARGIN_S)
        return msgspec.convert(told, list[ControlReplySlim])

    async def ask(self, question: Any, timeout_s: float = _ASK_S) -> Any:
        """Return the owner's answer.

        Raises the error that it answers with, and RequestError 400 for what no message can hold.
        """
        with on_the_wire():
            return await self.channel.ask(question, self.channel.number(), timeout_s)

    def _left(self, stream: Stream) -> None:
        if self._streams.pop(stream.rid, None) is not None:
            self.channel.send(Leave(stream.rid))

    # --- what the owner says

    def _heard(self, message: FromOwner) -> None:
        match message:
            case Rows():
                self._rows(message)
            case Standing():
                self._standing = message
                self._heard_at = asyncio.get_running_loop().time()
                self.weight_version = message.weight_version
                self.weight_path = message.weight_path
                self.weights_lost = message.weights_lost
                self.unloaded = message.unloaded
            case Asking():
                self._answer(message.number, message.question)
            case Cover():
                self.covered.become(message.workers)
            case Drain():
                self.drain.set()
            case AllIdle():
                self.all_idle.set()
            case Gone():
                self._fail(message.reason)

    def _rows(self, rows: Rows) -> None:
        streams = self._streams
        for rid, delta in zip(rows.rids, rows.deltas, strict=True):
            stream = streams.get(rid)
            if stream is None:
                continue  # left; what was on its way still arrives
            if delta.finished_reason:
                del streams[rid]
            stream.push(delta)

    def _answer(self, number: int, question: Any) -> None:
        match question:
            case Abort():
                ended = 0 if self._live is None else self._live.abort_named(question.names)
                self.channel.answer(number, ended)
            case Measure():
                told = [] if self._registry is None else families_of(self._registry)
                self.channel.answer(number, told)
            case _:
                self.channel.refuse(number, PeerError("no worker answers that"))

    async def _watch(self) -> None:
        await self.channel.lost.wait()
        self._fail("the owner of its link is gone")

    def _fail(self, reason: str) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(reason)


class SharedControl:
    """The operator's hand on the engines, at the owner's."""

    def __init__(self, link: SharedLink, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s

    @property
    def serving_s(self) -> float:
        told = self._link.standing.serving_s
        return told + self._link.told_ago_s if told else 0.0

    async def pause(self, mode: str) -> Outcome:
        return await self._outcome("pause", mode)

    async def resume(self) -> Outcome:
        return await self._outcome("resume")

    async def paused(self) -> bool:
        return bool(await self._asked("paused"))

    async def release(self, tags: list[str] | None, *, drops: bool = False) -> Outcome:
        return await self._outcome("release", tags, drops=drops)

    async def wake(self, tags: list[str] | None) -> Outcome:
        return await self._outcome("wake", tags)

    async def sleeping(self) -> bool:
        return bool(await self._asked("sleeping"))

    async def load_weights(
        self, method: str, args: Sequence[Any], *, version: str | None, abort: bool, rests: bool
    ) -> Outcome:
        how = {"version": version, "abort": abort, "rests": rests}
        return await self._outcome("load_weights", method, list(args), **how)

    async def join_weight_group(self, *args: Any) -> Outcome:
        return await self._outcome("join_weight_group", *args)

    async def leave_weight_group(self, name: str) -> Outcome:
        return await self._outcome("leave_weight_group", name)

    async def rename_weights(self, version: str) -> Outcome:
        return await self._outcome("rename_weights", version)

    async def weight_version(self) -> str:
        return str(await self._asked("weight_version"))

    async def weight_rows(self, name: str, count: int) -> Raw:
        return Raw((await self._asked("weight_rows", name, count)).encode())

    async def progress(self, timeout_s: float) -> tuple[Progress | None, ...]:
        """Return where each engine is; nothing, where that is not told within the time."""
        try:
            told = await self._link.ask(Steer("progress", [timeout_s], {}), timeout_s + _MARGIN_S)
        except PeerError:
            return ()
        return msgspec.convert(told, tuple[Progress | None, ...])

    async def states(self) -> list[Raw]:
        return [Raw(state.encode()) for state in await self._asked("states")]

    async def adjust(self, settings: dict[str, Any]) -> Outcome | Raw:
        told = await self._asked("adjust", settings)
        return Raw(told.encode()) if isinstance(told, str) else msgspec.convert(told, Outcome)

    async def start_profile(self, asked: ProfileAsked) -> Outcome:
        return await self._outcome("start_profile", msgspec.to_builtins(asked))

    async def stop_profile(self) -> Outcome:
        return await self._outcome("stop_profile")

    async def flush(self) -> Outcome:
        return await self._outcome("flush")

    async def _outcome(self, name: str, *args: Any, **options: Any) -> Outcome:
        return msgspec.convert(await self._asked(name, *args, **options), Outcome)

    async def _asked(self, name: str, *args: Any, **options: Any) -> Any:
        # A load of weights is several operations, each of which may take its time.
        try:
            question = Steer(name, list(args), options)
            return await self._link.ask(question, 4 * self._timeout_s + _MARGIN_S)
        except PeerError as error:
            raise as_request_error(error) from error


class SharedDesk:
    """What the workers agree on, at the owner's."""

    def __init__(self, link: SharedLink, live: LiveRequests, *, limited: bool) -> None:
        """Have requests counted where their number is `limited`."""
        self._link = link
        self._live = live
        self._limited = limited

    @asynccontextmanager
    async def held(
        self, names: Sequence[str] = (), *, counted: bool = False
    ) -> AsyncIterator[None]:
        if not names and not (counted and self._limited):
            yield
            return
        channel = self._link.channel
        number = channel.number()
        try:
            await channel.ask(Claim(list(names), counted), number, _ASK_S)
            yield
        finally:
            # Also of a claim whose answer nobody waited for: it comes behind the claim.
            channel.send(Release(number))

    async def abort(self, names: Sequence[str] | None) -> int:
        try:
            return int(await self._link.ask(Abort(None if names is None else list(names))))
        except PeerError as error:
            raise as_request_error(error) from error

    async def metrics(self) -> bytes:
        try:
            told: str = await self._link.ask(Measure(), 2 * _ASK_S)
        except PeerError as error:
            raise as_request_error(error) from error
        return told.encode()

    async def all_idle(self) -> None:
        await self._live.idle.wait()
        self._link.channel.send(Idle())
        await self._link.all_idle.wait()
