"""Copies are done step by step, by several threads, and whoever waits is told of a failure."""

import threading

import pytest

from drumline.core.clock import SystemClock
from drumline.core.errors import InvariantError
from drumline.device.copying import CopyThreads
from drumline.replay.clock import ManualClock


@pytest.fixture
def threads():
    made = CopyThreads(3, SystemClock())
    yield made
    made.stop()


def test_a_step_is_done_when_all_of_its_tasks_are_and_no_later_step_is_waited_for(threads):
    go = threading.Event()
    order = []
    held = [lambda: order.append("a"), lambda: go.wait(20)]
    copy = threads.start([held, [lambda: order.append("b")]], lambda: order.append("ended"))
    assert not copy._done[0].wait(0.05), "one of its tasks is under way"
    # The thread that has nothing left of the first step goes on to the second.
    copy.wait(1)
    assert order == ["a", "b"]
    go.set()
    copy.wait(0)
    copy.wait_all()
    assert order == ["a", "b", "ended"]


def test_steps_of_one_thread_come_in_order_and_the_end_is_told_before_the_last_wait(threads):
    order = []
    steps = [[lambda n=n: order.append(n)] for n in range(5)]
    threads.start(steps, lambda: order.append("ended")).wait(4)
    assert order == [0, 1, 2, 3, 4, "ended"]


def test_run_does_a_task_on_the_thread_that_asks_and_returns_when_all_are_done(threads):
    seen = []
    threads.run([lambda: seen.append(threading.current_thread().name) for _ in range(3)])
    assert sorted(seen) == sorted([threading.current_thread().name, "copy0", "copy1"])
    threads.run([])


def test_a_failure_reaches_whoever_waits_and_whoever_asks_later(threads):
    def fails():
        raise OSError("no such page")

    copy = threads.start([[fails], [lambda: None]], lambda: None)
    with pytest.raises(InvariantError, match="a copy failed: OSError: no such page") as raised:
        copy.wait(1)
    assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(InvariantError, match="no such page"):
        threads.check()
    with pytest.raises(InvariantError, match="no such page"):
        threads.run([lambda: None, lambda: None])


def test_stopping_finishes_what_was_begun():
    threads = CopyThreads(2, SystemClock())
    seen = []
    threads.start([[lambda: seen.append(0)], [lambda: seen.append(1)]], lambda: None)
    threads.stop()
    assert seen == [0, 1]
    with pytest.raises(InvariantError, match="a copy thread is gone"):
        threads.check()


def test_a_copy_that_hangs_is_reported_ever_less_often_whether_somebody_waits_or_not(caplog):
    clock = ManualClock()
    threads = CopyThreads(2, clock)
    begun, go = threading.Event(), threading.Event()

    def hangs():
        begun.set()
        assert go.wait(20)

    def reports(passing_s):
        clock.advance(int(passing_s * 1e6))
        caplog.clear()
        threads.check()
        return caplog.messages

    try:
        copy = threads.start([[hangs]], lambda: None)
        assert begun.wait(20)
        assert reports(9) == []
        assert reports(2) == ["copy0 has been at one copy for 11 s"]
        assert reports(8) == []
        clock.advance(int(4e6))
        caplog.clear()
        waits = threading.Thread(target=copy.wait_all)
        waits.start()
        for _ in range(200):
            if caplog.messages:
                break
            waits.join(0.01)
        assert caplog.messages == ["copy0 has been at one copy for 23 s"]
        go.set()
        waits.join(20)
        assert not waits.is_alive()
        assert reports(100) == []
    finally:
        go.set()
        threads.stop()
