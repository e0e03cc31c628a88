"""The sockets of an engine's frontend link, and the thread that alone touches them.

The control thread hands over columns and takes decoded messages; it encodes and
decodes nothing and waits for no socket. The link ends when the frontend's input
socket loses its connection, which means that the frontend is gone.

It knows no scheduler and no request's state, and decides nothing about requests.
"""

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Sequence

import zmq
from msgspec import UNSET
from zmq.utils.monitor import recv_monitor_message

from drumline.contract.messages import AbortAsked, CallAsked, CallReply, Message
from drumline.contract.outputs import Load, OutputColumns
from drumline.contract.ports import Clock
from drumline.control.transport.intake import MOST_BYTES, check_size, submitted
from drumline.control.transport.outgoing import slim
from drumline.core.clock import SystemClock
from drumline.core.errors import PeerError
from drumline.wire.codec import (
    Buffer,
    MalformedFrameError,
    check_nesting,
    decode_any,
    encode,
)
from drumline.wire.control import (
    NativeRequest,
    call_of,
    reply_to,
)
from drumline.wire.frames import (
    MOST_TENSOR_BYTES,
    Call,
    InputKind,
    carries_tensors,
    decode_control,
    decode_rids,
    kind_of,
)
from drumline.wire.handshake import (
    Addresses,
    Greeting,
    Registration,
    decode_init,
    identity_of,
)
from drumline.wire.output import ENGINE_CORE_DEAD, ControlReplySlim
from drumline.wire.progress import PROGRESS, Progress, encode_progress

log = logging.getLogger(__name__)

INIT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 60.0
_REPORT_S = 30.0
_LINGER_MS = 1000
_MESSAGES_A_TURN = 64
_REFUSALS_LOGGED = 10

_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Transport:
    """The frontend link of a replica's first member: `contract.ports.Frontend`.

    It dials `handshake` (an address that the frontend binds) and registers the engine
    of this index. Thread: made, started, used and closed by the control thread.
    """

    def __init__(
        self,
        handshake: str,
        registration: Registration,
        *,
        engine_index: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self._handshake = handshake
        self._registration = registration
        self._engine_index = engine_index
        self._clock = clock or SystemClock()
        self._inbox: list[Message] = []
        self._arrived = threading.Condition()
        self._outbox: deque[tuple[OutputColumns, Load] | CallReply] = deque()
        self._natives: dict[int, NativeRequest] = {}
        self._native_calls = 0
        self._rounds = 0
        self._round_since_us = self._clock.now_us()
        self._woken = False
        self._stopping = False
        self._registered = threading.Event()
        self._ended = threading.Event()
        self._failure: str | None = None
        self._wake_fd, self._wake_write_fd = os.pipe()
        self._thread = threading.Thread(target=self._main, name="frontend-link", daemon=True)
        self.refused = 0
        """Messages that made no sense and were dropped; written by the link's thread."""

    # --- the control thread's side

    def start(self) -> None:
        """Start dialing, and return at once."""
        self._thread.start()

    def ready(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` and return whether the frontend took the registration.

        Raises PeerError once the link has failed.
        """
        self._registered.wait(timeout_s)
        if self._ended.is_set():
            raise PeerError(self._failure or "the link to the frontend was closed")
        return self._registered.is_set()

    @property
    def closed(self) -> bool:
        """The frontend is gone: no message will arrive again."""
        return self._ended.is_set()

    @property
    def failure(self) -> str | None:
        """Why the link ended by itself."""
        return self._failure

    def receive(self, wait_s: float) -> list[Message]:
        """Return what arrived, in order. Waits up to `wait_s` for the first message.

        Once a round: this counts them, to say where the loop is while it is busy or stuck.
        """
        self._rounds += 1
        self._round_since_us = self._clock.now_us()
        if not self._inbox and (wait_s <= 0 or self._ended.is_set()):
            return []
        with self._arrived:
            if not self._inbox:
                self._arrived.wait(wait_s)
            messages, self._inbox = self._inbox, []
        return messages

    def send(self, outputs: OutputColumns, load: Load) -> None:
        """Send one round's outputs with the load; with no outputs, the load alone.

        The columns belong to the link from then on.
        """
        self._outbox.append((outputs, load))
        self._wake()

    def reply(self, reply: CallReply) -> None:
        """Send a control operation's answer."""
        self._outbox.append(reply)
        self._wake()

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is left and the engine's last word, and end the thread.

        Does nothing the second time.
        """
        if self._stopping:
            return
        self._stopping = True
        if self._thread.ident is not None:
            os.write(self._wake_write_fd, b"\0")
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("the frontend link did not end within %g s", timeout_s)
                return
        os.close(self._wake_fd)
        os.close(self._wake_write_fd)
        self._ended.set()

    def _wake(self) -> None:
        # The thread clears the mark before it empties the outbox, so what was put
        # there while the mark stood is seen without another wake-up.
        if not self._woken and not self._stopping:
            self._woken = True
            os.write(self._wake_write_fd, b"\0")

    # --- the thread's side

    def _main(self) -> None:
        context = zmq.Context()
        sockets: list[zmq.Socket[bytes]] = []
        try:
            addresses = self._greeted(context, sockets)
            if addresses is not None:
                self._serve(context, sockets, addresses)
        except (PeerError, zmq.ZMQError) as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("the frontend link broke")
            self._fail(f"it broke: {type(error).__name__}: {error}")
        finally:
            # Nobody waits for what was never heard, or by whom is gone.
            heard = self._registered.is_set() and self._failure is None
            for socket in sockets:
                socket.close(_LINGER_MS if heard else 0)
            context.term()
            with self._arrived:
                self._ended.set()
                self._registered.set()
                self._arrived.notify_all()

    def _fail(self, reason: str) -> None:
        log.info("frontend link ended: %s", reason)
        self._failure = reason

    def _dialed(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        sockets: "list[zmq.Socket[bytes]]",
        kind: int,
    ) -> "zmq.Socket[bytes]":
        """Return a socket to connect; DEALERs carry the engine's identity."""
        socket = context.socket(kind)
        sockets.append(socket)
        socket.set_hwm(0)
        socket.ipv6 = True  # for addresses that need it; others are dialled as ever
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, identity_of(self._engine_index))
        # A peer machine that vanishes closes nothing; the kernel's probes find out.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        return socket

    def _greeted(
        self, context: "zmq.Context[zmq.Socket[bytes]]", sockets: "list[zmq.Socket[bytes]]"
    ) -> Addresses | None:
        """Say HELLO and READY; returns where to connect, or None when told to stop.

        Raises PeerError when no INIT comes, or one that makes no sense.
        """
        socket = self._dialed(context, sockets, zmq.DEALER)
        socket.connect(self._handshake)
        size = self._registration.data_parallel_size
        # Of a lone engine nobody needs to know; a group is complete once so many have come.
        count = size if size > 1 else UNSET
        socket.send(encode(Greeting(status="HELLO", engine_count=count)))
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        began_us = self._clock.now_us()
        waited_s, report_s = 0.0, _REPORT_S
        # By the clock: what the loop wants to send meanwhile wakes the poll up, too.
        while waited_s < INIT_TIMEOUT_S:
            left_s = min(report_s, INIT_TIMEOUT_S) - waited_s
            ready = dict(poller.poll(math.ceil(left_s * 1000)))
            if self._stopping:
                return None
            if self._wake_fd in ready:
                self._drain_wakes()
            if socket in ready:
                init = decode_init(socket.recv_multipart()[0])
                if not init.addresses.inputs or not init.addresses.outputs:
                    raise MalformedFrameError("the frontend's INIT names no addresses")
                socket.send(encode(Greeting(status="READY")))
                socket.close(int(CONNECT_TIMEOUT_S * 1000))
                return init.addresses
            waited_s = (self._clock.now_us() - began_us) / 1e6
            if report_s <= waited_s < INIT_TIMEOUT_S:
                log.warning(
                    "no frontend at %s after %d s, still waiting", self._handshake, waited_s
                )
                report_s += _REPORT_S
        raise PeerError(f"no frontend answered at {self._handshake} within {INIT_TIMEOUT_S:g} s")

    def _serve(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        sockets: "list[zmq.Socket[bytes]]",
        addresses: Addresses,
    ) -> None:
        """Register, then carry messages until told to stop. Raises PeerError."""
        requests = self._dialed(context, sockets, zmq.DEALER)
        monitor = requests.get_monitor_socket(_MONITORED)
        sockets.append(monitor)
        requests.connect(addresses.inputs[0])
        requests.send(encode(self._registration))
        outputs = self._dialed(context, sockets, zmq.PUSH)
        outputs.connect(addresses.outputs[0])
        poller = zmq.Poller()
        for source in (requests, monitor, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        until_us = self._clock.now_us() + int(CONNECT_TIMEOUT_S * 1e6)
        while not self._stopping:
            left_ms = None
            if not self._registered.is_set():
                left_ms = math.ceil((until_us - self._clock.now_us()) / 1000)
                if left_ms <= 0:
                    raise PeerError(f"the frontend's {addresses.inputs[0]} cannot be reached")
            ready = dict(poller.poll(left_ms))
            if self._wake_fd in ready:
                self._drain_wakes()
            if requests in ready:
                self._take(requests, outputs)
            if monitor in ready:
                self._note_connection(recv_monitor_message(monitor)["event"])
            self._flush(outputs)
        self._flush(outputs)
        outputs.send(ENGINE_CORE_DEAD, zmq.NOBLOCK)

    def _drain_wakes(self) -> None:
        os.read(self._wake_fd, 4096)
        self._woken = False

    def _note_connection(self, event: int) -> None:
        """Raise PeerError when the connection ended that once stood."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._registered.set()
        elif event == zmq.EVENT_DISCONNECTED and self._registered.is_set():
            raise PeerError("the frontend is gone: its connection ended")

    def _take(self, requests: "zmq.Socket[bytes]", outputs: "zmq.Socket[bytes]") -> None:
        """Decode what arrived; a bounded number, so that outputs get their turn."""
        taken: list[Message] = []
        for _ in range(_MESSAGES_A_TURN):
            try:
                frames = requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = self._message(frames, outputs)
            except MalformedFrameError as error:
                self._refuse(error)
                continue
            if message is not None:
                taken.append(message)
        if taken:
            with self._arrived:
                self._inbox += taken
                self._arrived.notify()

    def _refuse(self, error: MalformedFrameError) -> None:
        self.refused += 1
        if self.refused <= _REFUSALS_LOGGED or self.refused % 1000 == 0:
            log.warning("refused a malformed message (%d so far): %s", self.refused, error)

    def _message(self, frames: Sequence[bytes], outputs: "zmq.Socket[bytes]") -> Message | None:
        """Return what came as the loop takes it; None when the link answered it itself.

        Raises MalformedFrameError.
        """
        match kind_of(frames):
            case InputKind.ADD:
                added = submitted(frames[1], self._registration.prefix_granularity)
                if added.request.invalid is not None:
                    log.info("request %s is refused: %s", added.request.rid, added.request.invalid)
                return added
            case InputKind.ABORT:
                check_size(frames[1])
                return AbortAsked(tuple(decode_rids(frames[1])))
            case InputKind.CONTROL:
                return self._call(frames[1], outputs)

    def _call(self, payload: Buffer, outputs: "zmq.Socket[bytes]") -> Message | None:
        check_size(payload, MOST_BYTES + carries_tensors(payload) * MOST_TENSOR_BYTES)
        try:
            asked = decode_control(payload)
            if isinstance(asked, Call):
                if asked.call_id < 0:
                    raise MalformedFrameError(f"a call's id is not negative, {asked.call_id} is")
                check_nesting("its arguments", asked.args)
        except MalformedFrameError as error:
            call_id = _readable_call_id(payload)
            if call_id is None:
                raise
            self._refuse(error)
            refusal = f"the call is malformed: {error}"
            self._put(outputs, self._reply(CallReply(call_id, success=False, message=refusal)))
            return None
        if isinstance(asked, Call):
            if asked.method == PROGRESS:
                self._put(outputs, self._reply(CallReply(asked.call_id, True, self._progress())))
                return None
            return CallAsked(asked.call_id, asked.method, tuple(asked.args))
        # Operations without an id get one below those that frontends give.
        self._native_calls += 1
        self._natives[-self._native_calls] = asked
        method, args = call_of(asked)
        return CallAsked(-self._native_calls, method, args)

    def _progress(self) -> str:
        since_us = self._clock.now_us() - self._round_since_us
        return encode_progress(Progress(self._rounds, max(0, since_us) / 1e6))

    def _flush(self, outputs: "zmq.Socket[bytes]") -> None:
        outbox = self._outbox
        while outbox:
            item = outbox.popleft()
            if isinstance(item, CallReply):
                self._put(outputs, self._reply(item))
            else:
                self._put(outputs, encode(slim(*item, self._engine_index)))

    def _reply(self, reply: CallReply) -> bytes:
        native = self._natives.pop(reply.call_id, None)
        if native is not None:
            return encode(reply_to(native, reply.success, reply.message))
        return encode(
            ControlReplySlim(
                call_id=reply.call_id,
                success=reply.success,
                message=reply.message,
                engine_index=self._engine_index,
            )
        )

    def _put(self, outputs: "zmq.Socket[bytes]", payload: bytes) -> None:
        try:
            outputs.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            # The queue has no limit, so this is a connection that ended.
            raise PeerError("the frontend is gone: its output socket takes nothing") from None


def _readable_call_id(payload: Buffer) -> int | None:
    """Return the id under which a malformed call can still be answered."""
    try:
        head = decode_any(payload)
    except MalformedFrameError:
        return None
    if isinstance(head, list) and head and type(head[0]) is int and head[0] >= 0:
        return head[0]
    return None
