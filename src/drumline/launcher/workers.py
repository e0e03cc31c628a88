"""The HTTP workers of one server: started, started again, and stopped.

A worker that ends while it serves is started again; its requests are aborted, and connections
that wait for it go to the others meanwhile, as they do while it answers nothing. One that hangs
for long is killed, which is the same. One that never
came to serve, or the fourth that ends within a minute, ends the server. It knows nothing of what
they serve.

Thread: the event loop's. Workers die with the thread that started them.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence

from drumline.core.config import Config
from drumline.core.errors import PeerError
from drumline.frontend.workers.hub import Hub
from drumline.frontend.workers.settings import WorkerSettings, encode_settings
from drumline.frontend.workers.worker_end import WorkerEnd
from drumline.wire.handshake import Registration

log = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "drumline.frontend.workers")

_MOST_ENDS, _ENDS_S = 3, 60.0
_END_S = 5.0
"""What workers get beyond the drain: to break off what is left, and to end."""
_POLL_S = 0.02
_ASK_EVERY_S = 2.0
_SILENT_S = 2.0
"""While one has answered nothing for so long, the others take its connections."""
HANGS_S = 30.0
"""A worker that answers nothing for so long is killed."""
STARTS_S = 120.0
"""One that does not serve so long after its start is, too."""


class Workers:
    """As many workers as there are `listeners`, each of which answers on its own."""

    def __init__(
        self,
        config: Config,
        registration: Registration,
        hub: Hub,
        listeners: Sequence[socket.socket],
        command: Sequence[str] = WORKER_COMMAND,
        *,
        hangs_s: float = HANGS_S,
        starts_s: float = STARTS_S,
    ) -> None:
        self._config = config
        self._registration = registration
        self._hub = hub
        self._listeners = listeners
        self._command = command
        self._hangs_s = hangs_s
        self._starts_s = starts_s
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ends: deque[float] = deque()
        self._keeping: list[asyncio.Task[None]] = []
        self._serving = asyncio.Event()
        self._missing = len(listeners)
        self._stopping = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        """The processes that run, by worker."""
        return [process.pid for _, process in sorted(self._processes.items())]

    async def start(self, timeout_s: float) -> None:
        """Start all; wait until each serves. Raises PeerError where one does not."""
        self._keeping = [
            asyncio.create_task(self._kept(index)) for index in range(len(self._listeners))
        ]
        serving = asyncio.create_task(self._serving.wait())
        try:
            await asyncio.wait(
                (serving, *self._keeping),
                timeout=timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for keeping in self._keeping:
                if keeping.done():
                    keeping.result()
            if not self._serving.is_set():
                raise PeerError(f"an HTTP worker does not serve after {timeout_s:g} s")
        finally:
            serving.cancel()

    async def lost(self) -> PeerError:
        """Wait until workers end in a way that nothing is to be done about; say how."""
        done, _ = await asyncio.wait(self._keeping, return_when=asyncio.FIRST_COMPLETED)
        error = next(iter(done)).exception()
        return error if isinstance(error, PeerError) else PeerError(f"HTTP workers: {error}")

    async def stop(self, drain_s: float) -> None:
        """Have all refuse what is new, finish what runs, and end; kill what does not."""
        self._stopping.set()
        self._hub.drain()
        try:
            await self._all_ended(drain_s + _END_S)
        finally:
            self.kill()
            await self._all_ended(_END_S)
            for keeping in self._keeping:
                keeping.cancel()
            await asyncio.gather(*self._keeping, return_exceptions=True)

    def kill(self) -> None:
        """Kill what is left, at once."""
        self._stopping.set()
        for index, process in self._processes.items():
            if process.poll() is None:
                log.warning("killing HTTP worker %d (pid %d)", index, process.pid)
                process.kill()

    async def _kept(self, index: int) -> None:
        """Keep worker `index` running. Raises PeerError once that is of no use."""
        loop = asyncio.get_running_loop()
        first = True
        while not self._stopping.is_set():
            process, ours = self._launched(index)
            worker = await self._hub.attach(index, ours)
            gone = asyncio.create_task(worker.channel.lost.wait())
            serves = asyncio.create_task(worker.serving.wait())
            await asyncio.wait(
                (gone, serves), timeout=self._starts_s, return_when=asyncio.FIRST_COMPLETED
            )
            if worker.serving.is_set() and first:
                first = False
                self._missing -= 1
                if not self._missing:
                    self._serving.set()
            serves.cancel()
            await self._until_gone(worker, process, gone)
            status = await _status(process)
            if self._stopping.is_set():
                return
            how = f"HTTP worker {index} ended with status {status}"
            if not worker.serving.is_set():
                raise PeerError(f"{how} before it served; its log is above")
            now = loop.time()
            self._ends.append(now)
            while self._ends[0] < now - _ENDS_S:
                self._ends.popleft()
            if len(self._ends) > _MOST_ENDS:
                raise PeerError(f"{how}, the {len(self._ends)}th within {_ENDS_S:g} s")
            log.error("%s; its requests are aborted, and it is started again", how)

    async def _until_gone(
        self, worker: WorkerEnd, process: subprocess.Popen[bytes], gone: asyncio.Task[bool]
    ) -> None:
        """Wait for a worker's end, which is made to come where it hangs."""
        if worker.serving.is_set():
            every_s, silent_s = min(_ASK_EVERY_S, self._hangs_s), min(_SILENT_S, self._hangs_s)
            hung = asyncio.create_task(self._hub.hung(worker, every_s, silent_s, self._hangs_s))
            try:
                await asyncio.wait((gone, hung), return_when=asyncio.FIRST_COMPLETED)
            finally:
                hung.cancel()
        if not worker.channel.lost.is_set():
            log.error("pid %d, an HTTP worker, says nothing and is killed", process.pid)
            process.kill()
        await gone

    def _launched(self, index: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        listening = [listener.fileno() for listener in self._listeners]
        with theirs:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(), *listening),
                start_new_session=True,
            )
            settings = WorkerSettings(
                config=self._config,
                registration=self._registration,
                index=index,
                channel_fd=theirs.fileno(),
                listener_fds=tuple(listening),
                launcher_pid=os.getpid(),
            )
        self._processes[index] = process
        assert process.stdin is not None
        try:
            process.stdin.write(encode_settings(settings))
            process.stdin.close()
        except BrokenPipeError:
            pass  # it died; the end of its channel says so
        return process, ours

    async def _all_ended(self, timeout_s: float) -> None:
        for _ in range(round(timeout_s / _POLL_S)):
            if all(process.poll() is not None for process in self._processes.values()):
                return
            await asyncio.sleep(_POLL_S)


async def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return how a process ended whose channel did; one that hangs is killed."""
    for _ in range(round(1 / _POLL_S)):
        if process.poll() is not None:
            return process.returncode
        await asyncio.sleep(_POLL_S)
    process.kill()
    return await asyncio.to_thread(process.wait)
