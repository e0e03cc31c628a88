"""A frontend's link to a group of engines: one set of sockets, one object.

The client binds; engines dial, say hello and register. Once all are there it routes
requests, cuts the engines' output batches into streams, and carries aborts and
control calls. It closes for good when an engine says its last word or loses its
connection: a group works in step, so a part of it is of no use.

It knows neither HTTP nor text, and starts no engine.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, overload

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from drumline.client.calls import Calls
from drumline.client.deltas import deltas
from drumline.client.inbox import Inbox
from drumline.client.places import beside, endpoint
from drumline.client.receiver import Into, R, Receiver
from drumline.client.reports import Reports
from drumline.client.roll import Roll
from drumline.client.routing import Policy, RoundRobin, Situation, pinned, roomed
from drumline.client.stream import Stream
from drumline.contract.outputs import Load
from drumline.contract.ports import Clock
from drumline.core.clock import SystemClock
from drumline.core.errors import ConfigError, PeerError, RequestError
from drumline.wire.codec import Buffer, MalformedFrameError, encode
from drumline.wire.frames import abort_frames, add_frames, call_frames
from drumline.wire.handshake import (
    MAX_ENGINES,
    Addresses,
    Init,
    Registration,
    decode_greeting,
    decode_registration,
    identity_of,
)
from drumline.wire.output import (
    ENGINE_CORE_DEAD,
    BatchTokenIDOutSlim,
    ControlReplySlim,
    Output,
    ragged,
)
from drumline.wire.request import TokenizedGenerateReqInput

log = logging.getLogger(__name__)

_LINGER_MS = 500


class EngineClient:
    """The link to `engines` engines, which register under the indices 0 … engines - 1.

    Thread: all of it on one event loop. Raises ConfigError for a size no group has.
    """

    def __init__(
        self, engines: int = 1, *, policy: Policy | None = None, clock: Clock | None = None
    ) -> None:
        if not 1 <= engines <= MAX_ENGINES:
            raise ConfigError("engines", f"a group has 1 to {MAX_ENGINES} engines, not {engines}")
        self._engines = engines
        self._policy = policy or RoundRobin()
        self._clock = clock or SystemClock()
        self._reports = Reports(engines, self._clock)
        self._calls = Calls()
        self._streams: dict[str, Receiver] = {}
        self._in_flight = [0] * engines
        self._busy_since_us = 0
        self._unreported = [0] * engines
        """Requests sent since an engine's last report."""
        self._roll = Roll(engines)
        self._init = b""
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.Socket[Any]] = []
        self._outputs: Inbox | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: str | None = None
        self.closed = asyncio.Event()
        """Set once an engine is gone or `close` was called; nothing works from then on."""
        self.weight_version = "default"
        """What the weights that serve are called, as whoever loads them says here."""
        self.weight_path: str | None = None
        """The checkpoint that was last loaded while the engine served."""
        self.weights_lost: str | None = None
        """Why no weights serve any more, as whoever lost them says here."""
        self.unloaded = False
        """Whether the weights were dropped, and others are still to be loaded."""
        self.dropped_frames = 0
        """Messages of engines that made no sense and were dropped whole."""

    # --- start and stop

    async def bind(self, address: str = "tcp://127.0.0.1:*") -> str:
        """Bind the sockets and return the address that engines must dial.

        `address` is `tcp://HOST:PORT` (`*` takes a free port) or `ipc://PATH`. The data
        sockets take free ports of the same host, or names beside the path.
        Raises ConfigError when the address cannot be bound.
        """
        try:
            handshake = self._bound(zmq.ROUTER, address)
            requests = self._bound(zmq.ROUTER, beside(address, "-in.sock"))
            outputs = self._bound_plain(zmq.PULL, beside(address, "-out.sock"))
        except zmq.ZMQError as error:
            await self.close()
            raise ConfigError(address, f"cannot be bound: {error.strerror}") from None
        requests.router_mandatory = 1
        self._requests = requests
        self._init = encode(
            Init(addresses=Addresses(inputs=[endpoint(requests)], outputs=[endpoint(outputs)]))
        )
        monitor = requests.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sockets.append(monitor)
        for work in (
            self._greet(handshake),
            self._register(requests),
            self._watch(monitor),
        ):
            self._spawn(work)
        self._outputs = Inbox(outputs, self._heard, self._broke)
        return endpoint(handshake)

    async def ready(self, timeout_s: float) -> Registration:
        """Wait until every engine registered; returns the first one's registration.

        Raises PeerError when that takes longer, or when an engine was refused or is gone.
        """
        ended = asyncio.create_task(self.closed.wait())
        complete = asyncio.create_task(self._roll.complete.wait())
        try:
            await asyncio.wait(
                (ended, complete), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ended.cancel()
            complete.cancel()
        self._check_open()
        if missing := self._roll.missing:
            raise PeerError(f"no word from engine {missing} within {timeout_s:g} s")
        return self._roll.first

    async def close(self) -> None:
        """End every stream and call, and close the sockets; does nothing the second time."""
        live = [stream.rid for stream in self._streams.values()]
        if live and not self.closed.is_set():
            for engine in range(self._engines):
                self._send(engine, abort_frames(live))
        self._fail("the client was closed")
        if self._outputs is not None:
            self._outputs.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for socket in self._sockets:
            socket.close(_LINGER_MS)
        self._sockets.clear()
        # Waits for what lingers, so that last aborts go out.
        try:
            await asyncio.to_thread(self._context.term)
        except RuntimeError:
            # The interpreter is ending and starts no threads; nobody else runs on this loop.
            self._context.term()

    def fail(self, reason: str) -> None:
        """End every stream and call with a reason, as who owns the engine knows that it is over."""
        self._fail(reason)

    # --- requests

    @overload
    def submit(self, request: TokenizedGenerateReqInput) -> Stream: ...

    @overload
    def submit(self, request: TokenizedGenerateReqInput, into: Into[R]) -> R: ...

    def submit(self, request: TokenizedGenerateReqInput, into: Into[Any] = Stream) -> Any:
        """Send a request to an engine and return its outputs to come, or who takes them.

        `into` makes a receiver of the id, the engine's index, and what is to be called with the
        receiver when nobody waits any more.
        Raises RequestError 409 for an id that is in flight, 400 for a request that no
        engine takes, and PeerError when the engine is gone or not there yet.
        """
        self._check_open()
        if not self._roll.complete.is_set():
            raise PeerError("the engine is not ready")
        rid = request.rid
        if not isinstance(rid, str) or not rid:
            raise RequestError(400, f"a request has one id, not {rid!r}", param="rid")
        if rid in self._streams:
            raise RequestError(409, f"a request with the id {rid!r} is in flight", param="rid")
        engine = self._engine_for(request)
        with on_the_wire():
            frames = add_frames(request)
        self._send(engine, frames)
        if not self._streams:
            self._busy_since_us = self._clock.now_us()
        stream = into(rid, engine, self._abort)
        self._streams[rid] = stream
        self._in_flight[engine] += 1
        self._unreported[engine] += 1
        return stream

    def _engine_for(self, request: TokenizedGenerateReqInput) -> int:
        pin = pinned(request.data_parallel_rank, self._engines)
        room = roomed(request.bootstrap_room, self._engines)
        if room is not None:
            if pin not in {None, room}:
                log.info("%s goes to engine %d by its room, not to %d", request.rid, room, pin)
            return room
        if pin is not None:
            return pin
        if self._engines == 1:
            return 0
        return self._policy.choose(
            Situation(
                self._in_flight, self._unreported, self._reports.loads, request.input_ids or ()
            )
        )

    @property
    def engines(self) -> int:
        """How many engines the group has."""
        return self._engines

    @property
    def in_flight(self) -> int:
        """Requests whose streams have not ended."""
        return len(self._streams)

    @property
    def busy_s(self) -> float:
        """Seconds for which some stream has been open; zero without any."""
        return (self._clock.now_us() - self._busy_since_us) / 1e6 if self._streams else 0.0

    @property
    def failure(self) -> str | None:
        """Why nothing works any more; None while it does."""
        return self._failure

    @property
    def loads(self) -> tuple[Load, ...]:
        """Every engine's load, by index; empty unless all are less than 3 s old."""
        return self._reports.loads

    @property
    def last_output_age_s(self) -> float:
        """Seconds since an engine last sent tokens, or since this client was made."""
        return self._reports.last_output_age_s

    async def call(
        self, method: str, *args: Any, timeout_s: float = 60.0
    ) -> tuple[ControlReplySlim, ...]:
        """Have every engine carry out a control operation; returns their replies by index.

        A reply with `success` false is a reply. Raises PeerError when an engine does not
        answer in time or is gone, RequestError 400 for arguments that no message can hold.
        """
        self._check_open()
        call_id, futures = self._calls.opened(self._engines)
        try:
            with on_the_wire():
                frames = call_frames(call_id, method, args)
            for engine in range(self._engines):
                self._send(engine, frames)
            async with asyncio.timeout(timeout_s):
                return tuple(await asyncio.gather(*futures))
        except TimeoutError:
            silent = self._calls.forget(call_id, self._engines)
            raise PeerError(
                f"engine {silent} did not answer {method} within {timeout_s:g} s"
            ) from None
        finally:
            self._calls.forget(call_id, self._engines)

    def cancel(self, stream: Receiver) -> None:
        """Have a request ended; its stream stays open for what the engine says of that."""
        if not stream.ended:
            self._send(stream.engine_index, abort_frames([stream.rid]))

    def _abort(self, stream: Receiver) -> None:
        self._forget(stream)
        if not self.closed.is_set():
            try:
                self._send(stream.engine_index, abort_frames([stream.rid]))
            except PeerError as error:
                log.debug("abort of %s not sent: %s", stream.rid, error)

    def _forget(self, stream: Receiver) -> None:
        if self._streams.pop(stream.rid, None) is not None:
            self._in_flight[stream.engine_index] -= 1

    def _send(self, engine: int, frames: Sequence[Buffer]) -> None:
        try:
            # Without a limit on its queue the socket never blocks; its future is done at once.
            sent = self._requests.send_multipart([identity_of(engine), *frames], flags=zmq.NOBLOCK)
            cast("asyncio.Future[object]", sent).result()
        except zmq.ZMQError as error:
            raise PeerError(f"engine {engine} cannot be reached: {error.strerror}") from None

    # --- what arrives

    async def _greet(self, handshake: zmq.asyncio.Socket) -> None:
        while True:
            frames = await handshake.recv_multipart()
            try:
                engine = self._roll.sender(frames[0], frames[1:])
                greeting = decode_greeting(frames[1])
            except MalformedFrameError as error:
                self._dropped("greeting", error)
                continue
            log.debug("engine %d says %s", engine, greeting.status)
            if greeting.status == "HELLO":
                await handshake.send_multipart([frames[0], self._init])

    async def _register(self, requests: zmq.asyncio.Socket) -> None:
        while True:
            frames = await requests.recv_multipart(copy=False)
            try:
                engine = self._roll.sender(frames[0].buffer, frames[1:])
                registration = decode_registration(frames[1].buffer)
            except MalformedFrameError as error:
                self._dropped("registration", error)
                continue
            fault = self._roll.enter(engine, registration, int(frames[1].get(zmq.SRCFD)))
            if fault is not None:
                self._fail(fault)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Close the client when the connection of a registered engine ends."""
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            engine = self._roll.at(int(event["value"]))
            if engine is not None:
                self._fail(f"engine {engine} is gone: its connection ended")

    def _heard(self, frame: bytes) -> None:
        """Take an engine's output."""
        if frame == ENGINE_CORE_DEAD:
            self._fail("the engine stopped")
            return
        try:
            self._deliver(self._roll.decode(frame))
        except MalformedFrameError as error:
            self._dropped("output", error)

    def _deliver(self, output: Output) -> None:
        """Cut an output into its streams. Raises MalformedFrameError for one to drop whole."""
        engine = self._roll.known(output.engine_index)
        if isinstance(output, ControlReplySlim):
            if not self._calls.answered(output):
                log.debug("nobody waits for the reply to call %d", output.call_id)
            return
        column = ragged(output)
        if column is not None:
            raise MalformedFrameError(
                f"column {column} has not the batch's {len(output.rids)} rows"
            )
        load = Load(
            num_running=output.num_running,
            num_waiting=output.num_waiting,
            kv_active_pages=output.kv_active_pages,
            kv_total_pages=output.kv_total_pages,
        )
        self._reports.heard(engine, load, bool(output.rids))
        self._unreported[engine] = 0
        self._cut(output)

    def _cut(self, batch: BatchTokenIDOutSlim) -> None:
        for rid, delta in deltas(batch):
            stream = self._streams.get(rid)
            if stream is None:
                continue  # aborted; what was on its way still arrives
            if delta.finished_reason:
                self._forget(stream)
                # Now, and not once somebody reads it: other weights may serve by then.
                delta.weight_version = self.weight_version
            stream.push(delta)

    # --- the end

    def _dropped(self, what: str, error: MalformedFrameError) -> None:
        self.dropped_frames += 1
        log.warning("dropped a malformed %s: %s", what, error)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise PeerError(self._failure)

    def _fail(self, reason: str) -> None:
        if self._failure is not None:
            return
        self._failure = reason
        log.debug("link closed: %s", reason)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(reason)
        self._calls.fail(reason)
        self.closed.set()

    def _bound(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        self._bind(socket, address)
        return socket

    def _bound_plain(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        """Bind a socket that nobody awaits."""
        socket: zmq.Socket[bytes] = zmq.Socket(self._context, kind)
        self._bind(socket, address)
        return socket

    def _bind(self, socket: "zmq.Socket[Any]", address: str) -> None:
        self._sockets.append(socket)
        socket.set_hwm(0)
        socket.ipv6 = "[" in address
        socket.bind(address)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke(error)

    def _broke(self, error: BaseException) -> None:
        log.error("the link to the engine broke", exc_info=error)
        self._fail(f"the link to the engine broke: {error}")


@contextmanager
def on_the_wire() -> Iterator[None]:
    """Make a message of a request. Raises RequestError 400 for a value that none can hold."""
    try:
        yield
    # Numbers beyond 64 bits, half a surrogate pair, nesting deeper than the stack.
    except (OverflowError, ValueError, RecursionError) as error:
        raise RequestError(400, f"a value cannot be sent to the engine: {error}") from None
