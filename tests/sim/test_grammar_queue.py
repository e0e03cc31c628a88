"""Requests that wait for grammars on several ranks, which compile them at their own pace."""

import random

import pytest
from tests.fakes.grammars import EOS, Line
from tests.fakes.members import Members

from drumline.contract.grammar import Compiling, GrammarFailure, GrammarKey, GrammarKind
from drumline.replay.simulator import Simulation

LIMIT_US = 12_000
KEYS = [GrammarKey(GrammarKind.REGEX, name) for name in ("a", "b", "c", "late", "wrong")]
LINES = {key: Line((7 + n, 300 - n, 9)) for n, key in enumerate(KEYS[:3])}
WRONG = GrammarFailure("it is no regex", permanent=True)
LATE = GrammarFailure("it did not compile in time", permanent=False)


class Compiler:
    """Takes its own time for each grammar, from when it is asked, and forgets a few again."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.now_us = lambda: 0
        self.due_us = {}

    def request(self, key):
        return self.state(key)

    def state(self, key):
        if key not in self.due_us:
            # The one that is late is late on some of the ranks, at times on none.
            slow = LIMIT_US * (1 + (key is KEYS[3]))
            self.due_us[key] = self.now_us() + self.draw.randrange(slow), self.now_us()
        due_us, began_us = self.due_us[key]
        if self.now_us() < min(due_us, began_us + LIMIT_US):
            return Compiling()
        if due_us - began_us > LIMIT_US:
            return LATE
        if self.draw.random() < 0.2:
            del self.due_us[key]
        return WRONG if key is KEYS[4] else LINES.get(key, Line((5,)))


class Replica:
    """Ranks in step, each with a plane, a compiler and a clock of its own."""

    def __init__(self, size, depth, seed):
        self.members = Members(size)
        compilers = [Compiler(f"{seed} {rank}") for rank in range(size)]
        self.sims = [
            Simulation(depth=depth, replica=seat, grammars=compiler)
            for seat, compiler in zip(self.members.seats, compilers, strict=True)
        ]
        for sim, compiler in zip(self.sims, compilers, strict=True):
            compiler.now_us = sim.clock.now_us
        self.owner = self.sims[0]

    def run(self, rounds):
        errors = self.members.all([lambda sim=sim: sim.run(rounds) for sim in self.sims])
        assert errors == [None] * len(self.sims)


def submit(replica, draw, rid):
    key = draw.choice([*KEYS, None])
    prompt = [draw.randrange(1, 512) for _ in range(draw.randint(1, 60))]
    replica.owner.submit(rid, prompt, grammar=key, max_new_tokens=8, ignore_eos=True)
    return key


def check_told(replica, rid, key, cut):
    told = replica.owner.answer(rid)
    if key in LINES:
        ids = [*LINES[key].ids]
        assert told.ids == (ids[: len(told.ids)] if told.finished == "abort" else ids)
        assert told.finished == "stop" or cut
    elif key is KEYS[3] and told.finished != "stop" and not cut:
        assert "status_code" not in told.details
        assert "did not compile in time" in told.details["message"]
    elif key is KEYS[4] and not cut:
        assert told.details["status_code"] == 400
        assert "it is no regex" in told.details["message"]


@pytest.mark.parametrize("seed", range(12))
def test_ranks_admit_the_same_requests_in_the_same_round_however_long_each_compiles(seed):
    draw = random.Random(seed)
    replica = Replica(draw.choice([1, 2, 3]), draw.choice([0, 1]), seed)
    asked, cut = {}, set()
    for n in range(16):
        rid = f"r{n}"
        asked[rid] = submit(replica, draw, rid)
        if draw.random() < 0.2:
            gone = f"r{draw.randrange(n + 1)}"
            cut.add(gone)
            replica.owner.abort(gone)
        if draw.random() < 0.1:
            cut |= asked.keys()  # as far as they live
            replica.owner.call(2 * n, "pause_scheduler", draw.choice(["abort", "wait", "keep"]))
            replica.run(3)
            replica.owner.call(2 * n + 1, "resume_scheduler")
        for sim in replica.sims[1:]:
            sim.clock.advance(draw.randrange(3_000))
        replica.run(draw.randint(1, 5))
    replica.run(120)
    for rid, key in asked.items():
        check_told(replica, rid, key, rid in cut)
    first = [record.digest for record in replica.owner.loop.records.kept]
    for sim in replica.sims:
        assert [record.digest for record in sim.loop.records.kept] == first
        assert not sim.plane.known
        sim.loop.check()
    replica.owner.check_drained()


@pytest.mark.parametrize("depth", [0, 1])
def test_what_a_grammar_allows_follows_at_every_depth_also_behind_a_prompt_in_chunks(depth):
    replica = Replica(2, depth, 0)
    line = LINES[KEYS[0]]
    for n, length in enumerate((1, 5, 31, 33, 64, 70)):
        prompt = list(range(1, length + 1))
        replica.owner.submit(f"r{n}", prompt, grammar=KEYS[0], max_new_tokens=9, ignore_eos=True)
        replica.owner.submit(f"free{n}", prompt, max_new_tokens=9, ignore_eos=True)
    replica.run(90)
    for n in range(6):
        assert replica.owner.answer(f"r{n}").ids == [*line.ids]
        assert replica.owner.answer(f"r{n}").details == {"type": "stop", "matched": EOS}
        assert len(replica.owner.answer(f"free{n}").ids) == 9
