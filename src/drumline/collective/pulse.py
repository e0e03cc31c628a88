"""Which peers are alive: heartbeats on connections and a thread of their own.

Every rank holds one pulse connection to every other. It carries heartbeats, each with what the
sender waits for; a farewell, when a rank leaves in order; and an alarm, when a rank found the
mesh broken. A connection that ends without farewell or alarm is a rank that died.

The first alarm, death or silence beyond the bound decides: it becomes the mesh's failure, is
passed on to every peer, and cuts the lines, which wakes a control thread that is blocked on
whichever peer. Passing it on before leaving is what lets the last rank still name the rank
that failed first.

It does not know exchanges beyond the tag that it is told a wait is for.
"""

import contextlib
import logging
import math
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from enum import IntEnum

from msgspec import Struct

from drumline.collective import frame
from drumline.collective.settings import MeshSettings
from drumline.contract.ports import Clock
from drumline.core.errors import DrumlineError, InvariantError, PeerError

_log = logging.getLogger(__name__)

_HEAD = struct.Struct("<BH")
_LONGEST_TEXT_BYTES = 2048
_READ_BYTES = 64 * 1024
# How long a line's end may run ahead of what the pulse has to say about it.
_VERDICT_GRACE_S = 1.0
_BUSY = "busy"


class _Kind(IntEnum):
    BEAT = 1
    FAREWELL = 2
    PEER_ALARM = 3
    INVARIANT_ALARM = 4


class Failure(Struct, frozen=True):
    """Why the mesh is of no use any more; `ours` tells an InvariantError from a PeerError."""

    text: str
    ours: bool = False

    def error(self, during: str) -> DrumlineError:
        """Return the error to raise on a rank that failed `during` an exchange."""
        if self.ours:
            return InvariantError(self.text)
        return PeerError(f"{self.text}; {during}")


class Wait(Struct, frozen=True):
    """Rank `rank` is awaited in the exchange of this tag and number."""

    rank: int
    exchange: tuple[bytes, int]

    def __str__(self) -> str:
        return f"waits for rank {self.rank} in {frame.describe(*self.exchange)}"


class _Peer:
    """One pulse connection and what came of it."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.missed = 0
        self.quiet = False
        self.state = _BUSY

    def post(self, message: bytes) -> None:
        """Send without waiting; what does not fit is kept for the next time."""
        self.outbox += message
        with contextlib.suppress(OSError):  # BlockingIOError: full; others: the reader notices
            del self.outbox[: self.connection.send(self.outbox)]


class Pulse:
    """Heartbeats to and from every peer, and the mesh's failure once there is one.

    `exchange` is the tag and number of the exchange that the control thread is in, and `awaited`
    the rank it may be blocked on there; it sets them, and this reads them.
    """

    def __init__(
        self,
        index: int,
        connections: Mapping[int, socket.socket],
        settings: MeshSettings,
        clock: Clock,
        on_failure: Callable[[], None],
    ) -> None:
        self.exchange: tuple[bytes, int] | None = None
        self.awaited = index
        self.failure: Failure | None = None
        self._index = index
        self._settings = settings
        self._clock = clock
        self._on_failure = on_failure
        self._peers = {rank: _Peer(rank, sock) for rank, sock in connections.items()}
        self._left: set[int] = set()
        self._closing = False
        # Guards failure, left, closing and every outbox.
        self._changed = threading.Condition()
        self._waited: Wait | None = None
        self._waited_beats = 0
        self._report_at = self._beats(settings.wait_report_s)
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name="mesh-pulse", daemon=True)

    def _beats(self, seconds: float) -> int:
        return max(1, math.ceil(seconds / self._settings.beat_s - 1e-9))

    def start(self) -> None:
        """Begin to beat and to listen."""
        self._thread.start()

    def fail(self, failure: Failure) -> Failure:
        """Make this the mesh's failure, unless it has one; tell every peer and cut the lines.

        Returns the failure that holds. Thread: any.
        """
        with self._changed:
            if self.failure is None:
                self.failure = failure
                kind = _Kind.INVARIANT_ALARM if failure.ours else _Kind.PEER_ALARM
                self._tell(kind, failure.text)
                self._changed.notify_all()
            holds = self.failure
        self._on_failure()
        return holds

    def verdict(self, rank: int, reason: str) -> Failure:
        """Return why the line to `rank` ended, which the pulse may be about to learn.

        Becomes the mesh's failure if it has none. Waits for up to a second.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure is not None or rank in self._left, _VERDICT_GRACE_S
            )
            left = rank in self._left
        if left:
            return self.fail(Failure(f"rank {rank} has left the mesh"))
        return self.fail(Failure(f"the connection to rank {rank} broke ({reason})"))

    def _tell(self, kind: _Kind, text: str) -> None:
        encoded = text.encode()[:_LONGEST_TEXT_BYTES]
        message = _HEAD.pack(kind, len(encoded)) + encoded
        for peer in self._peers.values():
            peer.post(message)

    def close(self) -> None:
        """Say farewell, unless the mesh failed; stop the thread and give the sockets back."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            if self.failure is None:
                self._tell(_Kind.FAREWELL, "")
                self.failure = Failure(f"rank {self._index} has closed its mesh", ours=True)
        self._wake_out.send(b"!")
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        for peer in self._peers.values():
            peer.connection.close()
        self._wake_in.close()
        self._wake_out.close()

    # The pulse thread.

    def _run(self) -> None:
        try:
            self._beat()
            due_us = self._clock.now_us() + self._beat_us
            while not self._closing:
                left_us = due_us - self._clock.now_us()
                if left_us > 0:
                    self._listen(left_us / 1e6)
                    continue
                # What arrived while this process did not run must count before a miss does.
                self._listen(0)
                self._judge()
                self._beat()
                due_us = self._clock.now_us() + self._beat_us
        except Exception as error:
            _log.exception("the mesh's pulse thread of rank %d failed", self._index)
            self.fail(Failure(f"rank {self._index}'s pulse thread failed: {error!r}", ours=True))

    @property
    def _beat_us(self) -> int:
        return int(self._settings.beat_s * 1e6)

    def _beat(self) -> None:
        state = f"itself {self._waited}" if self._waited_beats and self._waited else ""
        encoded = state.encode()[:_LONGEST_TEXT_BYTES]
        message = _HEAD.pack(_Kind.BEAT, len(encoded)) + encoded
        with self._changed:
            for peer in self._peers.values():
                # A peer that does not read gets no more heartbeats than its buffer holds.
                peer.post(b"" if peer.outbox else message)

    def _listen(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data is not None:
                self._read(key.data)

    def _read(self, peer: _Peer) -> None:
        try:
            arrived = peer.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            arrived = b""
        if not arrived:
            self._selector.unregister(peer.connection)
            if peer.rank not in self._left:
                self.fail(Failure(f"rank {peer.rank} died: its connections ended without a word"))
                self._left.add(peer.rank)
            return
        if peer.quiet:
            _log.warning("rank %d is heard again", peer.rank)
        peer.missed, peer.quiet = 0, False
        peer.inbox += arrived
        while len(peer.inbox) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(peer.inbox)
            if len(peer.inbox) < _HEAD.size + length:
                return
            text = bytes(peer.inbox[_HEAD.size : _HEAD.size + length]).decode(errors="replace")
            del peer.inbox[: _HEAD.size + length]
            self._take(peer, kind, text)

    def _take(self, peer: _Peer, kind: int, text: str) -> None:
        match kind:
            case _Kind.BEAT:
                peer.state = text or _BUSY
            case _Kind.FAREWELL:
                with self._changed:
                    self._left.add(peer.rank)
                    self._changed.notify_all()
            case _Kind.PEER_ALARM | _Kind.INVARIANT_ALARM:
                self.fail(Failure(text, ours=kind == _Kind.INVARIANT_ALARM))
                # It leaves next; that its connection then ends is no news.
                self._left.add(peer.rank)
            case _:
                text = f"rank {peer.rank} sent an unknown pulse ({kind})"
                self.fail(Failure(text, ours=True))

    def _judge(self) -> None:
        """Count a missed beat for every peer, and report what has lasted too long.

        Silence is counted in this thread's own beats: a process that was stopped itself, or
        starved, has then missed as little as it let pass.
        """
        if self.failure is not None:
            return
        for rank, peer in self._peers.items():
            if rank in self._left:
                continue
            peer.missed += 1
            silent_s = (peer.missed - 1) * self._settings.beat_s
            bound_s = self._settings.peer_timeout_s
            if bound_s is not None and peer.missed > self._beats(bound_s):
                self.fail(
                    Failure(
                        f"rank {rank} has not been heard for {bound_s:g} s: "
                        "it is stopped, or its machine is out of reach"
                    )
                )
            elif not peer.quiet and peer.missed > self._beats(self._settings.quiet_s):
                peer.quiet = True
                _log.warning(
                    "rank %d has not been heard for %.1f s (stopped?); %s",
                    rank,
                    silent_s,
                    "it is waited for" if bound_s is None else f"given up after {bound_s:g} s",
                )
        self._judge_wait()

    def _judge_wait(self) -> None:
        exchange, awaited = self.exchange, self.awaited
        waited = self._waited
        if exchange is None or awaited == self._index:
            self._waited, self._waited_beats = None, 0
            return
        # Every exchange sets another one.
        if waited is None or waited.exchange is not exchange or waited.rank != awaited:
            self._waited, self._waited_beats = Wait(awaited, exchange), 0
            self._report_at = self._beats(self._settings.wait_report_s)
            return
        self._waited_beats += 1
        if self._waited_beats < self._report_at:
            return
        self._report_at *= 2
        peer = self._peers[waited.rank]
        _log.warning(
            "rank %d %s, for %.1f s by now; rank %d %s",
            self._index,
            waited,
            self._waited_beats * self._settings.beat_s,
            waited.rank,
            f"has missed {peer.missed} beats" if peer.quiet else f"is alive and {peer.state}",
        )
