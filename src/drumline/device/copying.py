"""Threads that copy memory while the forward thread computes.

A copy is done in steps, one after the other, and a step's tasks side by side, one a
thread. Who needs only what an early step brings waits for that one. It does not know
what is copied, nor why in this order.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from drumline.contract.ports import Clock
from drumline.core.errors import InvariantError

Task = Callable[[], None]
"""A piece of copying; it does not hold the interpreter's lock while bytes move."""

_log = logging.getLogger(__name__)
_LIVENESS_S = 1.0
REPORT_S = 10.0
"""How long a task may take unreported: half a gigabyte is copied in a tenth of it."""


class Steps:
    """What of a copy is done.

    Memory that a copy may still write is nobody else's, so there is no time at which one is
    given up: while one lasts, it is reported.

    Thread: waited for by one thread, advanced by those that copy.
    """

    __slots__ = ("_done", "_ended", "_left", "_lock", "_threads")

    def __init__(self, threads: "CopyThreads", tasks: Sequence[int], ended: Task) -> None:
        """Expect `tasks[i]` tasks of step `i`; `ended` is called behind the last of all."""
        self._threads = threads
        self._left = list(tasks)
        self._done = [threading.Event() for _ in tasks]
        self._ended = ended
        self._lock = threading.Lock()

    def wait(self, step: int) -> None:
        """Return once a step is done, and report what takes long meanwhile.

        Raises InvariantError if copying failed.
        """
        done = self._done[step]
        while not done.is_set():
            self._threads.check()
            done.wait(_LIVENESS_S)
        self._threads.check()

    def wait_all(self) -> None:
        """Return once every step is done. Raises InvariantError if copying failed."""
        for step in range(len(self._done)):
            self.wait(step)

    def arrived(self, step: int) -> None:
        """Note that one of a step's tasks is done."""
        with self._lock:
            self._left[step] -= 1
            done, last = not self._left[step], not any(self._left)
        if last:
            self._ended()
        if done:
            self._done[step].set()

    def give_up(self) -> None:
        """Let whoever waits see that copying failed."""
        for done in self._done:
            done.set()


class Work:
    """What one thread is at, for whoever wonders why it takes so long."""

    __slots__ = ("_clock", "_next_us", "_since_us")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_us: int | None = None
        self._next_us = 0

    def begin(self) -> None:
        """Note that a task begins."""
        self._next_us = int(REPORT_S * 1e6)
        self._since_us = self._clock.now_us()

    def end(self) -> None:
        """Note that it is done."""
        self._since_us = None

    def overdue_s(self) -> float | None:
        """Return how long the task takes, if that is to be reported now: ever less often."""
        since = self._since_us
        if since is None:
            return None
        took = self._clock.now_us() - since
        if took < self._next_us:
            return None
        self._next_us = 2 * took
        return took / 1e6


class CopyThreads:
    """A few threads, each of which does what it is given in order."""

    __slots__ = ("_failure", "_queues", "_threads", "_works")

    def __init__(self, count: int, clock: Clock) -> None:
        self._failure: BaseException | None = None
        self._works = [Work(clock) for _ in range(count)]
        self._queues: list[queue.SimpleQueue[tuple[Steps, list[Task | None]] | None]] = [
            queue.SimpleQueue() for _ in range(count)
        ]
        self._threads = [
            threading.Thread(
                target=self._serve, args=(work, self._works[n]), name=f"copy{n}", daemon=True
            )
            for n, work in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._threads)

    def check(self) -> None:
        """Report tasks that take long. Thread: any.

        Raises InvariantError, with the failure as its cause, once a task failed.
        """
        if self._failure is not None:
            error = f"a copy failed: {type(self._failure).__name__}: {self._failure}"
            raise InvariantError(error) from self._failure
        if not all(thread.is_alive() for thread in self._threads):
            raise InvariantError("a copy thread is gone")
        for thread, work in zip(self._threads, self._works, strict=True):
            took_s = work.overdue_s()
            if took_s is not None:
                _log.warning("%s has been at one copy for %.0f s", thread.name, took_s)

    def start(self, steps: Sequence[Sequence[Task]], ended: Task) -> Steps:
        """Begin to copy: step after step, each of at least one task and at most one a thread.

        `ended` is called on one of the threads when all of it is done, before whoever waits
        for the last step goes on. Copies are begun in call order, and may end in another.
        """
        copy = Steps(self, [len(tasks) for tasks in steps], ended)
        for n, work in enumerate(self._queues[: max(map(len, steps))]):
            work.put((copy, [tasks[n] if n < len(tasks) else None for tasks in steps]))
        return copy

    def run(self, tasks: Sequence[Task]) -> None:
        """Do all tasks, one of them on this thread; returns when they are done."""
        if len(tasks) > 1:
            others = self.start([tasks[1:]], lambda: None)
            tasks[0]()
            others.wait(0)
        elif tasks:
            tasks[0]()

    def stop(self) -> None:
        """Finish what was begun, then end the threads. Idempotent."""
        for work in self._queues:
            work.put(None)
        for thread in self._threads:
            thread.join(_LIVENESS_S)
            if thread.is_alive():
                _log.warning("%s is left behind in the middle of a copy", thread.name)

    def _serve(
        self, queued: "queue.SimpleQueue[tuple[Steps, list[Task | None]] | None]", work: Work
    ) -> None:
        while (given := queued.get()) is not None:
            copy, tasks = given
            try:
                for step, task in enumerate(tasks):
                    if task is not None:
                        work.begin()
                        task()
                        work.end()
                        copy.arrived(step)
            except BaseException as error:
                _log.exception("a copy failed")
                self._failure = self._failure or error
                copy.give_up()
