"""The one thread that touches the device, and the queue in front of it.

It runs what it is given, in order, and knows nothing of what that does.
"""

import logging
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from drumline.core.errors import DrumlineError, InvariantError, PeerError
from drumline.device.guards import ForwardChecks
from drumline.device.landing import Landing, LandingThread

T = TypeVar("T")

_log = logging.getLogger(__name__)
_LIVENESS_S = 1.0
_SWITCH_INTERVAL_S = 1e-4


class Answer(Generic[T]):
    """What a queued task will return.

    Thread: set on the forward thread, awaited by any other.
    """

    __slots__ = ("_done", "_error", "_thread", "_value")

    def __init__(self, thread: "ForwardThread") -> None:
        self._thread = thread
        self._done = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def settle(self, value: T | None, error: BaseException | None) -> None:
        """Give the answer, once."""
        self._value = value
        self._error = error
        self._done.set()

    def wait(self) -> T | None:
        """Return the task's value once it ran, or raise what it raised."""
        while not self._done.wait(_LIVENESS_S):
            if not self._thread.alive:
                raise InvariantError("the forward thread is gone")
        if self._error is not None:
            raise self._error
        return self._value


Run = Callable[[], T | Landing[T]]
"""A task: its value, or what becomes of it once a device has computed it."""


class _Task(Generic[T]):
    """A task and where its answer goes. A `vital` one that fails ends the thread's work."""

    __slots__ = ("answer", "run", "vital")

    def __init__(self, run: "Run[T]", answer: Answer[T], vital: bool) -> None:
        self.run = run
        self.answer = answer
        self.vital = vital


class ForwardThread:
    """Runs tasks one at a time, first in, first out.

    It waits for no value that is still to land: a thread of its own does, which there is from
    the first such value on.
    """

    __slots__ = ("_checks", "_failure", "_landings", "_queue", "_thread")

    def __init__(self) -> None:
        # A forward takes the interpreter's lock again after each operation: with the default
        # interval, a control thread that computes makes it wait 5 ms each time.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._queue: queue.SimpleQueue[_Task[object] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._checks: ForwardChecks | None = None
        self._landings: LandingThread | None = None
        self._thread = threading.Thread(target=self._serve, name="forward", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        landings = self._landings
        return self._thread.is_alive() or (landings is not None and landings.alive)

    def check(self) -> None:
        """Raise InvariantError, with the first failure as its cause, once a task failed."""
        if self._failure is not None:
            raise _failed(self._failure)

    def submit(self, run: Run[T]) -> Answer[T]:
        """Queue a task that must not fail: if it does, no later one runs.

        Raises InvariantError, with the first failure as its cause, once a task failed; where that
        was a PeerError, the same.
        """
        self.check()
        return self._put(run, vital=True)

    def call(self, run: Callable[[], T]) -> T:
        """Run a task and return its value, or raise what it raised; later ones still run."""
        self.check()
        value: T | None = self._put(self._waiting(run), vital=False).wait()
        return value  # type: ignore[return-value]  # None only where T is

    def finish(self, run: Callable[[], T]) -> None:
        """Run a task that must not fail, as one of `submit`, and wait for it."""
        self.submit(self._waiting(run)).wait()

    def _waiting(self, run: Callable[[], T]) -> Callable[[], T]:
        """Return a task that may wait for the device, as somebody waits for the task."""
        return run if self._checks is None else self._checks.waiting()(run)

    def serve_checked(self, checks: ForwardChecks) -> None:
        """Start-up is over: no task may compile from now on, and none of `submit` may wait for
        the device.
        """
        self.call(checks.arm)
        self._checks = checks

    def stop(self, timeout_s: float = 60.0) -> None:
        """Run what is queued, then end the thread, which is waited for `timeout_s`. Idempotent."""
        if self._checks is not None:
            self._checks.disarm()
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self.alive:
            _log.warning("the forward thread did not end within %g s", timeout_s)
        if self._landings is not None:
            self._landings.stop(timeout_s)

    def _put(self, run: Run[T], *, vital: bool) -> Answer[T]:
        answer: Answer[T] = Answer(self)
        self._queue.put(_Task(run, answer, vital))  # type: ignore[arg-type]  # mixed answers
        return answer

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            if self._failure is not None:
                task.answer.settle(None, _failed(self._failure))
                continue
            self._settle(task, task.run)

    def _settle(self, task: _Task[object], value_of: Run[object]) -> None:
        """Answer a task with what `value_of` returns, once that has landed."""
        try:
            value = value_of()
        except BaseException as error:
            if task.vital:
                _log.exception("the forward thread failed")
                self._failure = self._failure or error
                error = _failed(error)
            task.answer.settle(None, error)
            return
        if not isinstance(value, Landing):
            task.answer.settle(value, None)
            return
        if self._landings is None:
            self._landings = LandingThread("landing")
        self._landings.put(partial(self._settle, task, value.land))


def _failed(cause: BaseException) -> DrumlineError:
    if isinstance(cause, PeerError):
        return cause  # another process is gone; no promise of ours broke
    error = InvariantError(f"the forward thread failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
