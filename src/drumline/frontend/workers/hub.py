"""The owner's end: the one link to the engine, shared among HTTP workers.

It routes what engines say to the worker that asked, as it comes, and keeps what workers must
agree on: which names are taken, how many requests run, and how the engine was steered. It
tokenizes nothing and knows no HTTP. A worker that is gone takes its requests with it.
"""

import asyncio
import logging
import socket
from collections.abc import Coroutine
from typing import Any

import msgspec
from msgspec import Raw
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from drumline.client.engine_client import EngineClient
from drumline.contract.profile import ProfileAsked
from drumline.core.clock import SystemClock
from drumline.core.errors import DrumlineError, PeerError, RequestError
from drumline.frontend.cache_states import CacheStates
from drumline.frontend.engine_control import EngineControl
from drumline.frontend.live_requests import in_use, too_many
from drumline.frontend.service import Timings
from drumline.frontend.workers.counted import Family, Shown, families_of, kept, summed
from drumline.frontend.workers.messages import (
    Abort,
    AllIdle,
    Call,
    Claim,
    Cover,
    Drain,
    Gone,
    Measure,
    Standing,
    Steer,
)
from drumline.frontend.workers.worker_end import WorkerEnd
from drumline.metrics.caches import CacheCollector
from drumline.metrics.loads import LoadCollector

log = logging.getLogger(__name__)

_TELL_S = 0.2
_ASK_S = 2.0
"""How long a worker may take for what it does at once; one that hangs holds up nobody else."""

STEERING = frozenset(
    {"pause", "resume", "paused", "release", "wake", "sleeping", "load_weights",
     "join_weight_group", "leave_weight_group", "rename_weights", "weight_rows",
     "weight_version", "progress", "states", "adjust", "start_profile", "stop_profile", "flush"}
)  # fmt: skip
"""The operations of `EngineControl` that workers may ask for."""


class Hub:
    """The engine link of several workers. Thread: the event loop's."""

    def __init__(
        self,
        engine: EngineClient,
        model_name: str,
        most: int | None,
        timings: Timings | None = None,
    ) -> None:
        """Share `engine`, and let `most` requests run at the same time, any number by default."""
        timings = timings or Timings()
        self._engine = engine
        self._most = most
        self._control = EngineControl(engine, timings.control_s, SystemClock())
        self._caches = CacheStates(engine, timings.ask_s)
        self._workers: set[WorkerEnd] = set()
        self._names: dict[str, WorkerEnd] = {}
        self._past: list[Family] = []
        """What workers counted that are gone."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._absent: set[int] = set()
        """The workers that served, and do not answer."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        LoadCollector(self.registry, model_name, lambda: engine.loads)
        CacheCollector(self.registry, model_name, lambda: self._caches.last)
        self._spawn(self._tell())
        self._spawn(self._watch())

    async def attach(self, index: int, end: socket.socket) -> WorkerEnd:
        """Serve worker `index`, which is at the other end of `end`."""
        worker = WorkerEnd(index, self._engine, self)
        self._workers.add(worker)
        await worker.channel.attach(end)
        worker.send(self._standing())
        if self._draining:
            worker.send(Drain())
        self._spawn(self._until_gone(worker))
        return worker

    async def hung(self, worker: WorkerEnd, every_s: float, silent_s: float, most_s: float) -> None:
        """Return once a worker that serves has answered nothing for `most_s`, if ever.

        It is asked, every so often, for what it counted, so that little of that is lost with it.
        While it has answered nothing for `silent_s`, the others take its connections.
        """
        while True:
            asked = asyncio.create_task(worker.ask(Measure(), most_s))
            try:
                await asyncio.wait((asked,), timeout=silent_s)
                if not asked.done():
                    log.warning(
                        "HTTP worker %d has answered nothing for %g s (stopped?): new connections "
                        "go to the others; it is killed after %g s",
                        worker.index,
                        silent_s,
                        most_s,
                    )
                    self._have_covered(worker.index, absent=True)
                worker.told = msgspec.convert(await asked, list[Family])
            except PeerError:
                return
            finally:
                asked.cancel()
            if worker.index in self._absent:
                log.warning("HTTP worker %d answers again", worker.index)
                self.serves(worker)
            await asyncio.sleep(every_s)

    def serves(self, worker: WorkerEnd) -> None:
        """Hear that a worker answers connections, its own from now on."""
        self._have_covered(worker.index, absent=False)

    def _have_covered(self, index: int, *, absent: bool) -> None:
        """Have the workers that answer do so for those that do not."""
        self._absent = self._absent | {index} if absent else self._absent - {index}
        for worker in self._workers:
            if worker.index not in self._absent:
                worker.send(Cover(sorted(self._absent)))

    def drain(self) -> None:
        """Have every worker refuse what is new; once all are idle, they end."""
        self._draining = True
        for worker in self._workers:
            worker.send(Drain())

    def idle(self) -> None:
        """Hear that a worker is idle: when all are, they may close their connections."""
        if self._draining and all(worker.idle for worker in self._workers):
            for worker in self._workers:
                worker.send(AllIdle())

    def answer(self, worker: WorkerEnd, number: int, question: Any) -> None:
        """Answer a worker's question, which may take a while."""
        if isinstance(question, Claim):  # in order with what releases it
            self._claim(worker, number, question)
        else:
            self._spawn(self._answered(worker, number, question))

    def release(self, worker: WorkerEnd, number: int) -> None:
        """Free what a worker claimed under a number."""
        for name in worker.claims.pop(number, ()):
            self._names.pop(name, None)
        worker.counted.discard(number)

    async def close(self) -> None:
        """Let go of all workers; the engine link is not the hub's own."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in list(self._workers):
            worker.channel.close()
            self._dismissed(worker)

    def _claim(self, worker: WorkerEnd, number: int, claim: Claim) -> None:
        taken = next((name for name in claim.names if name in self._names), None)
        running = sum(len(each.counted) for each in self._workers)
        if taken is not None:
            worker.channel.refuse(number, in_use(taken, "X-Request-Id"))
        elif claim.counted and self._most is not None and running >= self._most:
            worker.channel.refuse(number, too_many(self._most))
        else:
            self._names.update(dict.fromkeys(claim.names, worker))
            worker.claims[number] = claim.names
            if claim.counted:
                worker.counted.add(number)
            worker.channel.answer(number)

    async def _answered(self, worker: WorkerEnd, number: int, question: Any) -> None:
        try:
            worker.channel.answer(number, await self._done(question))
        except DrumlineError as error:
            worker.channel.refuse(number, error)
        except Exception as error:  # whatever it is, its asker must not wait for ever
            log.exception("a worker's question failed")
            worker.channel.refuse(number, PeerError(f"the owner of the link failed: {error}"))

    async def _done(self, question: Call | Steer | Abort | Measure) -> Any:
        match question:
            case Call():
                return await self._engine.call(
                    question.method, *question.args, timeout_s=question.timeout_s
                )
            case Steer():
                if question.name not in STEERING:
                    raise RequestError(501, f"{question.name} is no operation", code="unsupported")
                args = question.args
                if question.name == "start_profile":
                    args = [msgspec.convert(args[0], ProfileAsked)]
                done = await getattr(self._control, question.name)(*args, **question.options)
                # Before the answer: whoever is told of it may ask any worker next.
                self._tell_all()
                return _sendable(done)
            case Abort():
                counts = await self._from_all(question)
                return sum(count for count in counts if count is not None)
            case Measure():
                return (await self._metrics()).decode()

    async def _from_all(self, question: Abort | Measure) -> list[Any]:
        async def one(worker: WorkerEnd) -> Any:
            try:
                return await worker.ask(question, _ASK_S)
            except DrumlineError as error:
                log.warning("a worker did not answer: %s", error)
                return None

        return await asyncio.gather(*map(one, list(self._workers)))

    async def _metrics(self) -> bytes:
        await self._caches.refresh()
        workers = list(self._workers)
        for worker, counted in zip(workers, await self._from_all(Measure()), strict=True):
            if counted is not None:
                worker.told = msgspec.convert(counted, list[Family])
        # Of those that live by now: what one counted that is gone meanwhile is among the past.
        told = (each.told for each in self._workers)
        sources = [families_of(self.registry), *told, self._past]
        return generate_latest(Shown(summed(sources)))

    def _standing(self) -> Standing:
        engine = self._engine
        return Standing(
            list(engine.loads),
            engine.in_flight,
            engine.busy_s,
            engine.last_output_age_s,
            self._control.serving_s,
            engine.weight_version,
            engine.weight_path,
            engine.weights_lost,
            engine.unloaded,
        )

    def _tell_all(self) -> None:
        standing = self._standing()
        for worker in self._workers:
            worker.send(standing)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_TELL_S)
            self._tell_all()

    async def _watch(self) -> None:
        await self._engine.closed.wait()
        for worker in self._workers:
            worker.send(Gone(self._engine.failure or "its link was closed"))

    async def _until_gone(self, worker: WorkerEnd) -> None:
        await worker.channel.lost.wait()
        self._dismissed(worker)

    def _dismissed(self, worker: WorkerEnd) -> None:
        """Forget a worker that is gone, and end what it had asked for."""
        if worker not in self._workers:
            return
        self._workers.discard(worker)
        worker.leave_all()
        for number in list(worker.claims):
            self.release(worker, number)
        self._past = summed([self._past, kept(worker.told)])
        if worker.serving.is_set() and not self._draining:
            self._have_covered(worker.index, absent=True)
        self.idle()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _sendable(done: Any) -> Any:
    """Return an operation's result as the channel takes it: JSON's text as a string."""
    match done:
        case Raw():
            return bytes(done).decode()
        case list():
            return [_sendable(each) for each in done]
        case _:
            return done
