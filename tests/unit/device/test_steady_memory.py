"""Steady rounds leave nothing behind, and full collections come with forwards alone."""

import gc
import sys

import numpy as np

from drumline.contract.plan import Batch, Plan
from drumline.contract.ports import Dispatch, DpRound
from drumline.device import data_plane
from drumline.device.data_plane import QueuedDataPlane

from .small_rank import SmallDevice, SmallRank

WARM, STEADY = 90, 100
ROWS = 8


def test_a_steady_round_keeps_nothing_and_leaves_no_garbage(checkpoint, monkeypatch):
    device = SmallDevice(checkpoint("llama")[1])
    try:
        rank = SmallRank(device, caching=False)
        for row in range(ROWS):
            rank.submit(f"r{row}", [7 + row] * 4, stream=True, max_new_tokens=240)
        rank.run()
        with monkeypatch.context() as deaf:
            deaf.setattr(rank.frontend, "send", lambda *_: None)
            rank.run(WARM)
            gc.collect()
            gc.disable()
            before = sys.getallocatedblocks()
            rank.run(STEADY)
            kept = sys.getallocatedblocks() - before
            garbage = gc.collect()
        rank.finish()
    finally:
        gc.enable()
        device.close()
    assert garbage == 0
    # The records of the last rounds hold other numbers than before; one object kept for each
    # row of a round would be eight.
    assert kept / STEADY < 6


class Handle:
    """A device that does nothing."""

    def execute(self, *_):
        return None

    idle_forward = execute


class AtOnce:
    """A forward thread that runs what it is given where it stands."""

    def submit(self, run):
        run()
        return self

    def wait(self):
        return None


def batch(rows):
    ones = np.ones(rows, np.int32)
    return Batch(rows=ones, generations=ones, input_lengths=ones, prefix_lengths=ones)


IDLE = DpRound((0, 2), (0, 2), (0, 0), idle=True)


WORK = {
    "forward": (Plan(round=1, batch=batch(2)), Dispatch()),
    "cache work": (Plan(round=1), Dispatch()),
    "no tokens": (Plan(round=1, batch=batch(0)), Dispatch()),
    "idle forward": (Plan(round=1), Dispatch(dp=IDLE)),
}


ROUNDS = """forward, cache work, idle forward, no tokens, frozen, forward, forward, idle forward,
cache work, cache work"""


def test_full_collections_come_with_every_so_many_forwards_and_with_nothing_else(monkeypatch):
    monkeypatch.setattr(data_plane, "FULL_COLLECTION_FORWARDS", 3)
    collected, done = [], []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(done[-1]))
    plane = QueuedDataPlane(Handle(), AtOnce())
    for what in ROUNDS.replace("\n", " ").split(", "):
        done.append(what)
        if what == "frozen":
            plane.idle_forward(IDLE)
        else:
            plane.execute(*WORK[what])
    assert collected == ["frozen", "idle forward"]


def test_members_collect_in_the_same_round_whatever_each_has_besides(monkeypatch):
    monkeypatch.setattr(data_plane, "FULL_COLLECTION_FORWARDS", 4)
    at = {0: [], 1: []}
    planes = {rank: QueuedDataPlane(Handle(), AtOnce()) for rank in at}
    random = np.random.default_rng(3)
    for round_ in range(60):
        works = bool(random.integers(2))
        for rank, plane in planes.items():
            monkeypatch.setattr(gc, "collect", lambda r=rank, n=round_: at[r].append(n))
            for _ in range(random.integers(3)):
                plane.execute(*WORK["cache work"])
            if works:
                # The other replica has something to do, or this one.
                plane.execute(*WORK[str(random.choice(["forward", "idle forward"]))])
    assert at[0] == at[1]
    assert len(at[0]) > 4
