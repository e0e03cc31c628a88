"""The cache, its threads and its worker processes."""

import json
import os
import signal
import threading
import time

import psutil
import pytest

from drumline.contract.grammar import Compiling, GrammarFailure, GrammarKey, GrammarKind
from drumline.core.config import GrammarBackend, GrammarConfig
from drumline.grammar import compiler
from drumline.grammar.compiler import BUSY_US, MAX_TRIES, RETRY_US, GrammarCache
from drumline.replay.clock import ManualClock

LIMIT_S = 90


def schema(**properties):
    return GrammarKey(
        GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": properties})
    )


@pytest.fixture
def opened(vocabulary):
    caches = []

    def open_cache(clock=None, backend=GrammarBackend.LLGUIDANCE, **settings):
        config = GrammarConfig(grammar_backend=backend, **settings)
        cache = GrammarCache(config, lambda: vocabulary, clock or ManualClock())
        caches.append(cache)
        return cache

    yield open_cache
    for cache in caches:
        workers = cache.workers
        cache.close()
        assert not any(psutil.pid_exists(pid) for pid in workers)


def settled(cache, key):
    deadline = time.perf_counter() + LIMIT_S
    while time.perf_counter() < deadline:
        state = cache.state(key)
        if not isinstance(state, Compiling):
            return state
        time.sleep(0.01)
    raise AssertionError(f"{key} still compiles")


def test_a_grammar_compiles_off_the_calling_thread_and_is_shared(opened):
    cache = opened()
    key = schema(a={"type": "integer"})
    assert isinstance(cache.request(key), Compiling)
    assert isinstance(cache.request(key), Compiling)
    grammar = settled(cache, key)
    assert cache.request(key) is grammar
    assert not grammar.matcher().terminated


def test_no_worker_and_no_thread_exist_before_the_first_grammar(opened):
    cache = opened()
    assert cache.workers == []
    assert not [t for t in threading.enumerate() if t.name.startswith("grammar-")]


def test_a_grammar_that_is_refused_needs_no_worker_and_stays_refused(opened):
    cache = opened()
    key = GrammarKey(GrammarKind.JSON_SCHEMA, '{"if": {"type": "string"}, "then": false}')
    cache.request(key)
    state = settled(cache, key)
    assert state == GrammarFailure("at #: the keyword if is not supported", permanent=True)
    assert cache.request(key) is state
    assert cache.workers == []


def test_a_grammar_that_its_library_refuses_is_its_writers_fault(opened):
    cache = opened()
    key = GrammarKey(GrammarKind.REGEX, "(a")
    cache.request(key)
    state = settled(cache, key)
    assert state.permanent
    assert state.reason


def test_a_killed_worker_fails_its_grammar_for_a_while_and_no_other(opened):
    clock = ManualClock()
    cache = opened(clock)
    first = schema(a={"type": "integer"})
    cache.request(first)
    settled(cache, first)
    [pid] = cache.workers
    # Stopped, it is still at work when it is killed.
    os.kill(pid, signal.SIGSTOP)
    second = schema(b={"type": "integer"})
    cache.request(second)
    os.kill(pid, signal.SIGKILL)
    state = settled(cache, second)
    assert not state.permanent
    assert "ended" in state.reason
    third = schema(c={"type": "integer"})
    cache.request(third)
    assert not isinstance(settled(cache, third), GrammarFailure)
    assert cache.request(second) is state
    clock.advance(RETRY_US)
    cache.request(second)
    assert not isinstance(settled(cache, second), GrammarFailure)


def test_a_compile_that_hangs_is_killed_at_its_time_out_with_one_record(opened):
    clock = ManualClock()
    cache = opened(clock, grammar_compile_timeout=0.3)
    key = schema(a={"type": "integer"})
    warm = schema(warm={"type": "null"})
    cache.request(warm)
    settled(cache, warm)
    for attempt in range(1, MAX_TRIES + 1):
        [pid] = cache.workers
        os.kill(pid, signal.SIGSTOP)
        cache.request(key)
        cache.request(key)
        state = settled(cache, key)
        assert not state.permanent
        assert "within 0.3 s" in state.reason
        assert not psutil.pid_exists(pid)
        assert ("in 3 attempts" in state.reason) == (attempt == MAX_TRIES)
        other = schema(**{f"other{attempt}": {"type": "null"}})
        cache.request(other)
        settled(cache, other)
        clock.advance(RETRY_US)
    # Tried often enough: it is not tried again.
    assert cache.request(key) is state


def test_a_grammar_waits_for_others_compiles_as_long_as_it_may_and_may_come_again(opened):
    clock = ManualClock()
    cache = opened(clock, grammar_queue_timeout=20.0, grammar_compile_timeout=60.0)
    warm = schema(warm={"type": "null"})
    cache.request(warm)
    settled(cache, warm)
    [pid] = cache.workers
    os.kill(pid, signal.SIGSTOP)
    slow, second, third = (schema(**{name: {"type": "integer"}}) for name in "abc")
    cache.request(slow)
    eventually_begun(cache, slow)
    cache.request(second)
    clock.advance(15_000_000)
    cache.request(third)
    clock.advance(4_999_999)
    assert isinstance(cache.state(second), Compiling)
    clock.advance(1)
    # The one that compiles has a clock of its own, the last one has not waited long enough.
    assert isinstance(cache.state(slow), Compiling)
    assert isinstance(cache.state(third), Compiling)
    state = cache.state(second)
    assert state.busy
    assert not state.permanent
    assert "not its turn within 20 s" in state.reason
    clock.advance(BUSY_US - 1)
    assert cache.request(second) is state
    clock.advance(1)
    assert isinstance(cache.request(second), Compiling)
    os.kill(pid, signal.SIGCONT)
    for key in (slow, third, second):
        assert not isinstance(settled(cache, key), GrammarFailure)


def test_more_grammars_than_may_wait_find_no_room(opened, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_PENDING", 2)
    cache = opened()
    keys = [schema(**{name: {"type": "null"}}) for name in "abc"]
    states = [cache.request(key) for key in keys]
    assert [isinstance(state, Compiling) for state in states] == [True, True, False]
    assert states[2].busy
    for key in keys[:2]:
        assert not isinstance(settled(cache, key), GrammarFailure)
    assert isinstance(cache.request(keys[2]), Compiling)


def eventually_begun(cache, key):
    deadline = time.perf_counter() + LIMIT_S
    while not cache._records[key].begun:
        assert time.perf_counter() < deadline
        time.sleep(0.01)


def test_the_cache_holds_no_more_grammars_than_it_may(opened):
    cache = opened(grammar_cache_size=3)
    keys = [schema(**{f"p{n}": {"type": "null"}}) for n in range(6)]
    for key in keys:
        cache.request(key)
        settled(cache, key)
    # The first is compiled anew, the last is still there.
    assert isinstance(cache.request(keys[0]), Compiling)
    assert not isinstance(cache.request(keys[-1]), Compiling)


def test_closing_ends_a_compile_that_is_under_way(vocabulary):
    config = GrammarConfig(grammar_compile_timeout=60.0, grammar_backend=GrammarBackend.LLGUIDANCE)
    cache = GrammarCache(config, lambda: vocabulary, ManualClock())
    warm = schema(warm={"type": "null"})
    cache.request(warm)
    settled(cache, warm)
    [pid] = cache.workers
    os.kill(pid, signal.SIGSTOP)
    cache.request(schema(a={"type": "integer"}))
    cache.close()
    assert not psutil.pid_exists(pid)
    assert cache.workers == []


def test_xgrammar_compiles_in_a_worker_and_then_here(opened):
    cache = opened(backend=GrammarBackend.XGRAMMAR)
    key = schema(a={"type": "integer"})
    cache.request(key)
    assert not settled(cache, key).matcher().terminated
