"""A rank's process: what it needs to start, what it reports, and how it ends."""

import gc
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import msgspec
import pytest

from drumline.contract.startup import (
    AHEAD,
    Failed,
    RankSettings,
    Ready,
    Step,
    decode_report,
    decode_settings,
    encode_report,
    encode_settings,
)
from drumline.core.config import Config, ModelConfig
from drumline.core.errors import ConfigError, InvariantError
from drumline.rank.heap import freeze_heap, suspend_collections
from drumline.rank.lifeline import Reports

BROKEN = """
import runpy, sys, threading, time, types
from drumline.core.errors import InvariantError

def serve(settings, reports, stop):
    threading.Thread(target=time.sleep, args=(60,)).start()
    reports.begin("serving")
    error = InvariantError("a page has two owners")
    error.add_note("the last rounds: 7, 8, 9")
    raise error

sys.modules["drumline.rank.wiring"] = types.SimpleNamespace(serve=serve)
runpy.run_module("drumline.rank", run_name="__main__")
"""
RANK = ("-m", "drumline.rank")


@contextmanager
def rank_process(config: Config, launcher_pid: int | None = None, program=RANK):
    """Start a real rank; yields the process and the reading end of its report pipe."""
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [sys.executable, *program],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(write_fd,),
    )
    os.close(write_fd)
    settings = RankSettings(
        config=config,
        handshake="tcp://127.0.0.1:1",
        report_fd=write_fd,
        launcher_pid=os.getpid() if launcher_pid is None else launcher_pid,
    )
    process.stdin.write(encode_settings(settings))
    process.stdin.flush()
    try:
        with os.fdopen(read_fd, "rb") as reports:
            yield process, reports
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stderr.close()


def test_a_rank_without_settings_says_who_starts_ranks():
    done = subprocess.run(
        [sys.executable, "-m", "drumline.rank"],
        input="hello\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 2
    assert "ranks are started by the launcher" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_rank_that_was_started_ahead_for_nothing_ends_in_silence():
    done = subprocess.run(
        [sys.executable, "-m", "drumline.rank", AHEAD, str(os.getpid())],
        input="",
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_rank_reports_its_steps_and_what_the_operator_can_mend():
    with rank_process(Config(model=ModelConfig(model="/nowhere"))) as (process, reports):
        said = [decode_report(line) for line in reports]
        assert said[0] == Step("imports")
        assert isinstance(said[-1], Failed)
        assert said[-1].setting == "--model"
        assert "/nowhere" in said[-1].reason
        assert said[-1].exit_code == process.wait(10) == 2
        assert b"Traceback" not in process.stderr.read()


def test_a_broken_promise_is_told_with_its_story_and_no_thread_holds_the_process_up():
    with rank_process(Config(), program=("-c", BROKEN)) as (process, reports):
        assert process.wait(10) == 1
        last = [decode_report(line) for line in reports][-1]
        assert last == Failed("serving", "InvariantError: a page has two owners", 1)
        log = process.stderr.read()
        assert b"the last rounds: 7, 8, 9" in log
        assert b"Traceback" in log


def test_a_rank_whose_launcher_is_not_its_parent_ends_at_once():
    with rank_process(Config(), launcher_pid=1) as (process, reports):
        assert process.wait(20) == 1
        assert reports.read() == b""


def test_a_rank_ends_when_its_launchers_pipe_does_whatever_it_is_at():
    with rank_process(Config()) as (process, reports):
        assert decode_report(reports.readline()) == Step("imports")
        began = time.perf_counter()
        process.stdin.close()
        process.wait(5)
        assert time.perf_counter() - began < 2
        process.stdin = open(os.devnull)  # noqa: SIM115  closed with the process


@pytest.mark.parametrize("report", [Step("a"), Ready("b"), Failed("c", "d", 2, "--e")])
def test_reports_cross_the_pipe(report):
    line = encode_report(report)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_report(line) == report


def test_settings_cross_the_pipe_and_strangers_are_refused():
    settings = RankSettings(
        config=Config(model=ModelConfig(model="m")), handshake="h", report_fd=3, launcher_pid=4
    )
    assert decode_settings(encode_settings(settings)) == settings
    with pytest.raises(msgspec.ValidationError):
        decode_settings(json.dumps({"handshake": "h"}).encode())


def test_a_failure_is_one_line_with_its_kind():
    read_fd, write_fd = os.pipe()
    reports = Reports(write_fd)
    reports.begin("weights")
    reports.failed(InvariantError("broken\nthe last rounds:\n  …"), 1)
    reports.failed(ConfigError("--x", "no"), 2)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        _, broken, refused = map(decode_report, pipe)
    assert broken == Failed("weights", "InvariantError: broken", 1)
    assert refused == Failed("weights", "no", 2, "--x")


def test_a_report_to_a_dead_launcher_is_let_go():
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    Reports(write_fd).ready("nobody reads this")
    os.close(write_fd)


def test_freezing_the_heap_keeps_old_objects_from_collections():
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        suspend_collections()
        assert not gc.isenabled()
        freeze_heap()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
        full = gc.get_stats()[2]["collections"]
        for _ in range(200_000):
            # Young ones that survive: by default they would bring full collections about.
            kept = [[] for _ in range(5)]
            kept.append(kept)
        assert gc.get_stats()[1]["collections"] > 0
        assert gc.get_stats()[2]["collections"] == full
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
