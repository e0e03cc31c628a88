"""Processes of a mesh that are killed, stopped, or slow."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from tests.fakes import mesh_member
from tests.fakes.meshes import TOKEN, listening

from drumline.collective.settings import MeshSettings, Seat


class Member:
    """One rank's process, and what it has printed."""

    def __init__(self, seat, settings, pause_s):
        command = [
            sys.executable,
            mesh_member.__file__,
            msgspec.json.encode(seat).decode(),
            msgspec.json.encode(settings).decode(),
            str(pause_s),
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def send(self, number):
        os.kill(self.process.pid, number)

    def until(self, said, since=0, within_s=20):
        """Wait for a line that contains `said`; returns it."""
        due = time.perf_counter() + within_s
        while time.perf_counter() < due:
            for line in self.lines[since:]:
                if said in line:
                    return line
            time.sleep(0.005)
        pytest.fail(f"no {said!r} within {within_s} s in {self.lines}")

    def end(self):
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()


@contextlib.contextmanager
def members(size, pauses=None, **settings):
    free, address = listening()
    free.close()
    running = [
        Member(
            Seat(index, size, address, TOKEN),
            MeshSettings(**settings),
            (pauses or {}).get(index, 0.001),
        )
        for index in range(size)
    ]
    try:
        for member in running:
            member.until("ready")
        yield running
    finally:
        for member in running:
            member.end()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_at_once_by_every_other(victim):
    with members(3, peer_timeout_s=30) as running:
        for member in running:
            member.until("round 20")
        running[victim].send(signal.SIGKILL)
        for index in {0, 1, 2} - {victim}:
            ended = running[index].until("ended", within_s=3)
            assert ended.startswith(f"ended PeerError rank {victim} died: ")
            assert f"rank {index}" in ended
            assert "of replica[0-2]" in ended
            assert running[index].process.wait(3) == 0


def test_a_killed_rank_is_noticed_by_ranks_that_wait_for_another():
    with members(4, pauses={2: 60}, peer_timeout_s=30) as running:
        time.sleep(0.2)
        running[3].send(signal.SIGKILL)
        waits = {0: "rank 0 waits for rank 2", 1: "rank 1 waits for rank 0"}
        for index, wait in waits.items():
            ended = running[index].until("ended", within_s=3)
            assert ended.startswith("ended PeerError rank 3 died: ")
            assert wait in ended


def test_a_stopped_rank_is_reported_and_given_up_within_its_bound():
    with members(3, peer_timeout_s=1.0) as running:
        running[0].until("round 20")
        start = time.perf_counter()
        running[1].send(signal.SIGSTOP)
        running[0].until("rank 1 has not been heard for", within_s=3)
        for index in (0, 2):
            ended = running[index].until("ended", within_s=4)
            assert ended.startswith("ended PeerError rank 1 has not been heard for 1 s: ")
        assert time.perf_counter() - start > 0.8
        running[1].send(signal.SIGCONT)
        ended = running[1].until("ended", within_s=3)
        assert ended.startswith("ended PeerError rank 1 has not been heard for 1 s: ")


def test_without_a_bound_a_stopped_rank_is_reported_and_goes_on_when_it_is_continued():
    with members(2, peer_timeout_s=None) as running:
        running[0].until("round 20")
        running[1].send(signal.SIGSTOP)
        assert running[0].until("has not been heard", within_s=5).endswith("it is waited for")
        stopped = len(running[0].lines)
        running[1].send(signal.SIGCONT)
        running[0].until("rank 1 is heard again", stopped)
        running[0].until("round", stopped)


def test_all_ranks_may_be_stopped_together_for_longer_than_the_bound():
    with members(3, peer_timeout_s=1.0) as running:
        running[0].until("round 20")
        for member in running:
            member.send(signal.SIGSTOP)
        time.sleep(1.6)
        seen = [len(member.lines) for member in running]
        for member in running:
            member.send(signal.SIGCONT)
        for member, since in zip(running, seen, strict=True):
            member.until("round", since + 1)
            assert not any("ended" in line for line in member.lines)
