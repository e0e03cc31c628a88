"""Compiled grammars by key: compiled off the round, shared, and kept while they are used.

A grammar has one record, whoever asks for it: it waits for a compiler thread, compiles,
and is then ready or failed. A failure that is its writer's stays; one that is ours, a
time-out or a worker that ended, is told for a while and then tried again, a few times.
How long it compiles counts from when a thread takes it up; how long it waits for that has
a limit of its own, behind which it is told that there is no room.
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable

from drumline.contract.grammar import (
    Compiling,
    Grammar,
    GrammarFailure,
    GrammarKey,
    GrammarState,
)
from drumline.contract.ports import Clock
from drumline.core.config import GrammarConfig
from drumline.core.errors import PeerError
from drumline.grammar.backends import Backend, open_backend
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.prepare import Prepared, prepared
from drumline.grammar.trial import CompileTimeoutError, Trial
from drumline.grammar.vocabulary import Vocabulary

MAX_PENDING = 1024
"""Grammars that may wait for their compile."""
RETRY_US = 30_000_000
"""How long a failure of ours is told before the grammar is tried again."""
MAX_TRIES = 3
BUSY_US = 5_000_000
"""How long a grammar that found no room is told so before it may wait again."""

_STOP_S = 0.05

_COMPILING = Compiling()

_log = logging.getLogger(__name__)


class _Record:
    """What is known of one key."""

    __slots__ = ("begun", "failed_us", "queued_us", "state", "tries")

    def __init__(self) -> None:
        self.state: GrammarState = _COMPILING
        self.tries = 0
        self.queued_us = self.failed_us = 0
        self.begun = False
        """Whether a thread has taken it up, since it was queued last."""

    @property
    def waits(self) -> bool:
        return self.state is _COMPILING and not self.begun


class GrammarCache:
    """Implements `contract.ports.GrammarCompiler` with threads and worker processes.

    Thread: any; nothing here waits for a compile.
    """

    def __init__(
        self,
        config: GrammarConfig,
        vocabulary: Callable[[], Vocabulary],
        clock: Clock,
    ) -> None:
        """Keep how to compile. `vocabulary` is read by the first compile, on its thread."""
        self._config = config
        self._read_vocabulary = vocabulary
        self._clock = clock
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._records: OrderedDict[GrammarKey, _Record] = OrderedDict()
        self._queue: queue.SimpleQueue[GrammarKey | None] = queue.SimpleQueue()
        self._pending = 0
        self._threads: list[threading.Thread] = []
        self._trials: list[Trial] = []
        self._closed = False
        self._vocabulary: Vocabulary | None = None
        self._backend: Backend | None = None

    @property
    def workers(self) -> list[int]:
        """The worker processes there are."""
        return [pid for trial in list(self._trials) if (pid := trial.pid) is not None]

    def request(self, key: GrammarKey) -> GrammarState:
        """Return what is known of a grammar; one that is not known begins its compile."""
        with self._lock:
            record = self._records.get(key)
            if record is not None:
                self._records.move_to_end(key)
                self._give_up_late(record)
                if not self._due_again(record):
                    return record.state
            return self._begin(key)

    def state(self, key: GrammarKey) -> GrammarState:
        """Return what is known of a grammar; one that was forgotten is compiled anew."""
        with self._lock:
            record = self._records.get(key)
            if record is not None:
                self._give_up_late(record)
                return record.state
        return self.request(key)

    def close(self) -> None:
        """End the threads and kill the workers. Grammars that are held stay usable."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            # A thread that waits for its worker goes on when that is dead; it may just start one.
            while thread.is_alive():
                for trial in list(self._trials):
                    trial.stop()
                thread.join(_STOP_S)
        for trial in self._trials:
            trial.kill()

    def _due_again(self, record: _Record) -> bool:
        failure = record.state
        if not isinstance(failure, GrammarFailure) or failure.permanent:
            return False
        since_us = self._clock.now_us() - record.failed_us
        if failure.busy:
            return since_us >= BUSY_US
        return record.tries < MAX_TRIES and since_us >= RETRY_US

    def _give_up_late(self, record: _Record) -> None:
        """Let a grammar wait no longer that has waited for its turn as long as it may."""
        limit_s = self._config.grammar_queue_timeout
        now_us = self._clock.now_us()
        if record.waits and now_us - record.queued_us >= limit_s * 1e6:
            record.state = GrammarFailure(
                f"{self._pending} grammars wait for their compile, and it was not its turn "
                f"within {limit_s:g} s",
                permanent=False,
                busy=True,
            )
            record.failed_us = now_us
            self._pending -= 1

    def _begin(self, key: GrammarKey) -> GrammarState:
        record = self._records.get(key)
        if record is None:
            if self._pending >= MAX_PENDING or self._closed:
                return GrammarFailure(
                    "too many grammars wait for their compile", permanent=False, busy=True
                )
            record = self._records[key] = _Record()
        record.state = _COMPILING
        record.queued_us = self._clock.now_us()
        record.begun = False
        self._pending += 1
        if len(self._threads) < min(self._config.grammar_workers, self._pending):
            number = len(self._threads)
            thread = threading.Thread(target=self._run, name=f"grammar-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queue.put(key)
        return record.state

    def _run(self) -> None:
        """Compile what is queued. Thread: one of the compiler's own."""
        trial: Trial | None = None
        while (key := self._queue.get()) is not None:
            if not self._taken_up(key):
                continue
            state: Grammar | GrammarFailure
            try:
                # Checked here and not where it is asked for: a source may have many kilobytes.
                checked = prepared(key)
                trial = trial or self._new_trial()
                state = self._compile(key, checked, trial)
            except RefusedGrammarError as error:
                state = GrammarFailure(str(error), permanent=True)
            except Exception as error:  # one grammar's trouble is no reason to end for others
                _log.exception("compiling grammar %s failed", key)
                state = GrammarFailure(f"compiling it failed: {error}", permanent=False)
            self._keep(key, state)

    def _taken_up(self, key: GrammarKey) -> bool:
        """Whether to compile a grammar now; one that came late may be queued twice, or not wait."""
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return False
            self._give_up_late(record)
            if not record.waits:
                return False
            record.begun = True
            return True

    def _new_trial(self) -> Trial:
        config = self._config
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        trial = Trial(config.grammar_backend, self._vocabulary, config.grammar_compile_timeout)
        self._trials.append(trial)
        return trial

    def _compile(
        self, key: GrammarKey, checked: Prepared, trial: Trial
    ) -> Grammar | GrammarFailure:
        limit_s = self._config.grammar_compile_timeout
        try:
            if self._closed:
                return GrammarFailure("the engine stops", permanent=False)
            trial.start()
            # The first time, this process loads its library beside the worker.
            backend = self._loaded()
            trial.attempt(checked)
            return backend.compile(checked)
        except CompileTimeoutError:
            _log.warning("grammar %s did not compile within %g s", key, limit_s)
            return GrammarFailure(f"it did not compile within {limit_s:g} s", permanent=False)
        except PeerError as error:
            _log.warning("grammar %s: %s", key, error)
            return GrammarFailure(str(error), permanent=False)

    def _loaded(self) -> Backend:
        with self._loading:
            if self._backend is None:
                assert self._vocabulary is not None
                self._backend = open_backend(self._config.grammar_backend, self._vocabulary)
            return self._backend

    def _keep(self, key: GrammarKey, state: Grammar | GrammarFailure) -> None:
        with self._lock:
            record = self._records[key]
            record.state = state
            self._pending -= 1
            if isinstance(state, GrammarFailure) and not state.permanent:
                record.tries += 1
                record.failed_us = self._clock.now_us()
                if record.tries >= MAX_TRIES:
                    record.state = GrammarFailure(
                        f"{state.reason}, in {record.tries} attempts", permanent=False
                    )
            else:
                record.tries = 0
            self._forget()

    def _forget(self) -> None:
        """Drop the records that were asked for longest ago; never one that compiles."""
        excess = len(self._records) - self._config.grammar_cache_size - self._pending
        if excess <= 0:
            return
        done = [key for key, record in self._records.items() if record.state is not _COMPILING]
        for key in done[:excess]:
            del self._records[key]
