"""The rank processes of one engine: started together, watched together, stopped once.

It starts them by command, never by import, and knows of what they do only what
they report (`contract.startup`). A rank holds its report pipe open until it ends,
so the pipe's end is how its death is noticed; a rank's standard input stays open
until this process ends, so a launcher that is killed takes its ranks with it.

Thread: everything here belongs to the event loop's thread. Ranks die with the
thread that started them, so it must outlive them.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from drumline.collective.door import Address, listen
from drumline.contract.layout import Layout
from drumline.contract.startup import (
    EXIT_OPERATOR,
    Failed,
    Meeting,
    RankSettings,
    Ready,
    Report,
    Step,
    decode_report,
    encode_settings,
)
from drumline.core.config import Config, ServerConfig
from drumline.core.errors import ConfigError, DrumlineError, PeerError
from drumline.launcher.nodes import meeting_place, shared_token
from drumline.launcher.rank_process import RANK_COMMAND, Ahead, RankProcess

log = logging.getLogger(__name__)

_READ_BYTES = 65536
_REAP_S = 1.0
_TOGETHER_S = 10.0
"""How far apart the ends of ranks may be that stop after the same round."""
_POLL_S = 0.02

OnStep = Callable[[int, str], None]


class _Rank:
    """One child, its report pipe, and how far it said it came."""

    __slots__ = (
        "closed",
        "failed",
        "index",
        "killed",
        "process",
        "ready",
        "report_fd",
        "step",
        "steps",
        "unread",
    )

    def __init__(self, index: int, process: subprocess.Popen[bytes], report_fd: int) -> None:
        self.index = index
        self.process = process
        self.report_fd = report_fd
        self.step = "launch"
        self.steps = 0
        """How many parts of its start-up, and of its end, it has begun."""
        self.killed = False
        self.ready: Ready | None = None
        self.failed: Failed | None = None
        self.unread = b""
        self.closed = False

    def epitaph(self) -> DrumlineError:
        """Return the error that says how this rank ended."""
        name = f"rank {self.index}"
        if self.failed is not None:
            failed = self.failed
            if failed.exit_code == EXIT_OPERATOR and self.ready is None:
                return ConfigError(failed.setting, failed.reason)
            return PeerError(f"{name} failed at {failed.step!r}: {failed.reason}")
        code = self.process.poll()
        if code is None:
            how = "closed its report pipe and hangs"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with status {code}"
        where = "while serving" if self.ready else f"at {self.step!r}"
        why = "ranks stop together when one is told to" if code == 0 else "its log is above"
        return PeerError(f"{name} {how} {where}; {why}")


class Ranks:
    """An engine's rank processes."""

    def __init__(
        self,
        command: Sequence[str] = RANK_COMMAND,
        on_step: OnStep | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """Start none yet; a lone rank may have been started `ahead`."""
        self._ahead = ahead
        self._command = command
        self._on_step = on_step
        self._ranks: list[_Rank] = []
        self._changed = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    @property
    def _steps(self) -> int:
        """How far all ranks came, together."""
        return sum(rank.steps for rank in self._ranks)

    def start(self, config: Config, handshake: str) -> None:
        """Start this machine's ranks, without waiting for any.

        Each replica's first dials `handshake`, as the first machine has it. Raises ConfigError
        when the address where they would meet cannot be used.
        """
        parallel = config.parallel
        layout = Layout.of(parallel)
        with contextlib.ExitStack() as closing:
            meeting = None
            if layout.size > 1:
                place, token = meeting_place(parallel), shared_token(parallel)
                listener = None
                if parallel.node == 0:
                    listener = closing.enter_context(_listening(place, layout.size))
                meeting = _meeting(place, token, listener)
            first = parallel.node * parallel.local_ranks
            for index in range(first, first + parallel.local_ranks):
                self._ranks.append(self._launched(config, handshake, layout, index, meeting))
                # The socket is rank 0's.
                meeting = meeting and replace(meeting, listener_fd=None)

    def _launched(
        self, config: Config, handshake: str, layout: Layout, index: int, meeting: Meeting | None
    ) -> _Rank:
        # Who listens for the others inherits the socket; who is alone may have started before.
        started = self._ahead.take() if self._ahead is not None and meeting is None else None
        if started is None:
            listener = None if meeting is None else meeting.listener_fd
            started = RankProcess(self._command, [] if listener is None else [listener])
        process = started.process
        rank = _Rank(index, process, started.read_fd)
        settings = RankSettings(
            # Without what the server keeps: ranks have no business with its keys.
            config=replace(config, server=ServerConfig()),
            handshake=handshake,
            engine_index=config.frontend.zmq_engine_index + layout.data_index(index),
            rank=index,
            meeting=meeting,
            report_fd=started.report_fd,
            launcher_pid=os.getpid(),
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died; its pipe's end says so
            process.stdin.write(encode_settings(settings))
            process.stdin.flush()
        asyncio.get_running_loop().add_reader(rank.report_fd, self._read, rank)
        return rank

    def _read(self, rank: _Rank) -> None:
        try:
            data = os.read(rank.report_fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(rank.report_fd)
            os.close(rank.report_fd)
            rank.closed = True
            self._changed.set()
            return
        *lines, rank.unread = (rank.unread + data).split(b"\n")
        for line in lines:
            try:
                self._note(rank, decode_report(line))
            except msgspec.DecodeError as error:
                log.error("rank %d reported what is no report: %s", rank.index, error)

    def _note(self, rank: _Rank, report: Report) -> None:
        match report:
            case Step():
                rank.step = report.name
                rank.steps += 1
                if self._on_step is not None and rank.ready is None:
                    self._on_step(rank.index, report.name)
            case Ready():
                rank.ready = report
            case Failed():
                rank.failed = report
        self._changed.set()

    async def ready(self, timeout_s: float) -> list[Ready]:
        """Wait until every rank serves; return what they say of themselves.

        Stops nothing. Raises ConfigError when the operator can mend what a rank met,
        PeerError when a rank ended or is not ready after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._all_ready()
        except TimeoutError:
            # Of those that are late, others wait for the one that came the least far.
            late = min(
                (rank for rank in self._ranks if rank.ready is None), key=attrgetter("steps")
            )
            raise PeerError(
                f"rank {late.index} is not ready after {timeout_s:g} s, it is at {late.step!r}; "
                "raise --startup-timeout if it only needs longer, as a machine that compiles the "
                "kernels for the first time may"
            ) from None

    async def _all_ready(self) -> list[Ready]:
        while True:
            # A rank's end counts even after its own report: others may wait for it.
            for rank in self._ranks:
                if rank.closed or rank.failed is not None:
                    raise await self._ended(rank)
            ready = [rank.ready for rank in self._ranks if rank.ready is not None]
            if len(ready) == len(self._ranks):
                return ready
            self._changed.clear()
            await self._changed.wait()

    async def lost(self) -> DrumlineError:
        """Wait until any rank ends by itself; return the error that says how."""
        return await self._ended(await self._one_closed())

    async def _one_closed(self) -> _Rank:
        while True:
            for rank in self._ranks:
                if rank.closed:
                    return rank
            self._changed.clear()
            await self._changed.wait()

    async def over(self) -> DrumlineError | None:
        """Wait until the ranks end by themselves, all of them; return what made them, if anything.

        Ranks stop after the same round, whoever told one of them to; one that is still there
        long after another is left to the caller, who stops all.
        """
        await self._one_closed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TOGETHER_S):
                while not all(rank.closed for rank in self._ranks):
                    self._changed.clear()
                    await self._changed.wait()
        closed = [rank for rank in self._ranks if rank.closed]
        await _exited(closed, _REAP_S)
        broken = [rank for rank in closed if rank.process.poll() != 0]
        return min(broken, key=_distance).epitaph() if broken else None

    async def _ended(self, rank: _Rank) -> DrumlineError:
        """Return why a rank ended, or why the one did that it could not go on without.

        It gets a moment to be reaped, for the sake of its status.
        """
        await _exited([rank], _REAP_S)
        over = [one for one in self._ranks if one.closed or one.failed is not None]
        return min(over, key=_distance).epitaph()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Stop every rank: ask, wait, kill. Further calls await the first one's end.

        The wait ends when no rank came any further for `grace_s`: a forward that runs cannot
        be broken off, and ranks say when they are past it.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.terminate()
        further = True
        while further:
            before = self._steps
            await _exited(self._ranks, grace_s)
            further = self._steps > before
        self.kill()
        await _exited(self._ranks, _REAP_S)
        loop = asyncio.get_running_loop()
        for rank in self._ranks:
            if rank.process.stdin is not None:
                rank.process.stdin.close()
            if not rank.closed:
                loop.remove_reader(rank.report_fd)
                os.close(rank.report_fd)
                rank.closed = True

    def kill(self) -> None:
        """Kill what is left of every rank and of what it started, at once."""
        for rank in self._ranks:
            if rank.process.poll() is None and not rank.killed:
                rank.killed = True
                log.warning("killing rank %d (pid %d)", rank.index, rank.process.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)


def _distance(rank: _Rank) -> int:
    """Return how far a rank's end is from the cause: who only lost another is behind it."""
    if rank.failed is None:
        return 0
    return 1 + rank.failed.of_peer


@contextlib.contextmanager
def _listening(place: Address, size: int) -> Iterator[socket.socket]:
    """Keep a socket on which rank 0 will meet the others; it inherits its own copy."""
    try:
        listener = listen(place, size)
    except ConfigError as error:
        raise ConfigError("--dist-init-addr", error.reason) from None
    with listener:
        yield listener


def _meeting(place: Address, token: str, listener: socket.socket | None) -> Meeting:
    if listener is None:
        return Meeting(str(place), token)
    return Meeting(str(Address(*listener.getsockname()[:2])), token, listener.fileno())


async def _exited(ranks: Sequence[_Rank], timeout_s: float) -> None:
    """Wait until all of `ranks` are reaped, at most `timeout_s`."""
    for _ in range(math.ceil(timeout_s / _POLL_S)):
        if all(rank.process.poll() is not None for rank in ranks):
            return
        await asyncio.sleep(_POLL_S)
