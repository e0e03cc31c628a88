"""The harness of `make bench-peers`: works, figures, order of runs, verdicts, processes."""

import importlib.metadata
import json
import os
import sys

import psutil
import pytest
from benchmarks.peers import contest
from benchmarks.peers.bars import CONTESTS, Bar, Contest
from benchmarks.peers.child import Child
from benchmarks.peers.driven import Driven
from benchmarks.peers.engine import Answer, PeerFailed, Side
from benchmarks.peers.figures import FIGURES
from benchmarks.peers.place import Place, install
from benchmarks.peers.report import Row, as_json, table
from benchmarks.peers.work import WORKS, Sizes, Work

SMALL = Sizes(share=0.05, requests=0.1, seconds=1.0)


def answer(began, *stamps, tokens_a_chunk=1, decode_s=None):
    counts = [tokens_a_chunk * (index + 1) for index in range(len(stamps))]
    return Answer(began, list(stamps), counts, decode_s)


def test_runs_differ_and_both_sides_of_a_run_are_asked_the_same():
    for make in WORKS.values():
        assert make(SMALL, 1) == make(SMALL, 1)
        assert make(SMALL, 1) != make(SMALL, 2)


def test_the_sizes_are_those_of_the_bars():
    shape = {
        name: [(len(work.prompts), len(work.prompts[0]), work.tokens[0]) for work in made]
        for name, make in WORKS.items()
        if (made := make(Sizes(), 0)) and name != "W6"
    }
    assert shape == {
        "W1": [(1, 128, 128)],
        "W2": [(16, 128, 128)],
        "W3": [(64, 128, 64)],
        "W4": [(8, 1024, 1)],
        "W5": [(32, 1056, 32), (32, 1056, 32)],
        "context 256": [(1, 256, 64)],
        "context 4096": [(1, 4096, 64)],
    }


def test_the_warm_requests_share_a_prefix_with_the_cold_ones_and_nothing_else():
    cold, warm = WORKS["W5"](Sizes(), 3)
    prompts = cold.prompts + warm.prompts
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == len(prompts)


def test_requests_arrive_one_after_the_other_at_the_rate():
    (work,) = WORKS["W6"](Sizes(seconds=500.0), 0)
    assert work.arrivals == sorted(work.arrivals)
    assert work.arrivals[-1] < 500
    assert 3.5 < len(work.arrivals) / 500 < 4.5


def test_figures_of_answers():
    work = Work("x", [[1] * 10, [1] * 30], [4, 4], [0.0, 0.0])
    answers = [answer(1.0, 1.5, 1.7, 1.8, 2.0), answer(2.0, 2.1, 2.3, 2.8, 3.0)]
    figures = {name: round(figure(work, answers), 6) for name, figure in FIGURES.items()}
    assert figures == {
        "decode tok/s": round((3 / 0.5 + 3 / 0.9) / 2, 6),
        "step ms": round(1e3 / ((3 / 0.5 + 3 / 0.9) / 2), 6),
        "output tok/s": 4.0,
        "prompt tok/s": 20.0,
        "req/s": 1.0,
        "TTFT p50 ms": 300.0,
        "TTFT p99 ms": 496.0,
        "ITL p50 ms": 200.0,
        "ITL p99 ms": 485.0,
    }


def test_a_rate_is_what_the_engine_says_of_itself_and_counts_tokens_not_chunks():
    work = Work("x", [[1]], [8], [0.0])
    chunks = answer(0.0, 1.0, 2.0, 3.0, 5.0, tokens_a_chunk=2)
    assert FIGURES["decode tok/s"](work, [chunks]) == 6 / 4
    told = answer(0.0, 1.0, 2.0, 3.0, 5.0, tokens_a_chunk=2, decode_s=3.5)
    assert FIGURES["decode tok/s"](work, [told]) == 2.0


class Played:
    """An engine that takes `seconds` for everything, and notes what it was asked when."""

    def __init__(self, name, notes, seconds, fails_at=None):
        self.name = name
        self.notes = notes
        self.seconds = seconds
        self.fails_at = fails_at

    pid = os.getpid()

    def start(self):
        self.notes.append(f"{self.name} starts")
        if self.fails_at == "start":
            raise PeerFailed("has no licence")

    def measure(self, work):
        self.notes.append(f"{self.name} {work.name}")
        if self.fails_at == work.name:
            raise PeerFailed("ended: out of luck")
        return [
            Answer(0.0, [self.seconds, 2 * self.seconds], [1, tokens]) for tokens in work.tokens
        ]

    def stop(self):
        self.notes.append(f"{self.name} stops")


TRIED = Contest(
    "other",
    Side(),
    Side("bf16", http=True),
    {
        "W1": {"decode tok/s": Bar(2.0), "TTFT p50 ms": Bar(0.4, most=True)},
        "W5 cold": {"req/s": None},
        "W5 warm": {"req/s": Bar(9.0)},
        "W4": {"prompt tok/s": Bar(1.0)},
    },
)


def tried(ours_fails=None, theirs_fails=None, runs=2):
    notes = []
    ours = Played("ours", notes, 1.0, ours_fails)
    theirs = Played("theirs", notes, 3.0, theirs_fails)
    try:
        rows = contest.run(TRIED, ours, theirs, runs, SMALL, lambda _: None)
    except (PeerFailed, contest.OursFailed) as error:
        rows = error
    return rows, notes


def test_both_sides_take_turns_and_each_goes_first():
    _, notes = tried()
    assert notes == [
        *("theirs starts", "theirs warm", "ours starts", "ours warm"),
        *("ours W1", "theirs W1", "theirs W1", "ours W1"),
        *("ours W5 cold", "ours W5 warm", "theirs W5 cold", "theirs W5 warm"),
        *("theirs W5 cold", "theirs W5 warm", "ours W5 cold", "ours W5 warm"),
        *("ours W4", "theirs W4", "theirs W4", "ours W4"),
        *("ours stops", "theirs stops"),
    ]


def test_rows_say_whether_a_bar_holds():
    rows, _ = tried()
    assert [(row.work, row.figure, row.verdict) for row in rows] == [
        ("W1", "decode tok/s", "holds"),
        ("W1", "TTFT p50 ms", "holds"),
        ("W5 cold", "req/s", "compared"),
        ("W5 warm", "req/s", "misses"),
        ("W4", "prompt tok/s", "holds"),
    ]
    assert [round(row.ratio, 3) for row in rows] == [3.0, 0.333, 3.0, 3.0, 3.0]


def test_a_peer_that_fails_at_a_work_keeps_what_was_measured_before():
    rows, notes = tried(theirs_fails="W5 warm")
    assert [row.verdict for row in rows] == ["holds", "holds", "failed", "failed", "failed"]
    assert notes[-2:] == ["ours stops", "theirs stops"]
    assert "ours W4" not in notes
    assert "other (bf16, HTTP): ended: out of luck" in table(rows)


def test_a_peer_that_does_not_start_is_named_with_the_reason():
    error, notes = tried(theirs_fails="start")
    assert isinstance(error, PeerFailed)
    assert notes == ["theirs starts", "ours stops", "theirs stops"]
    rows = contest.unmeasured(TRIED, str(error))
    assert {row.verdict for row in rows} == {"failed"}
    assert table(rows).endswith("other (bf16, HTTP): has no licence")


@pytest.mark.parametrize("when", ["start", "W1"])
def test_a_failure_of_drumline_is_no_failure_of_the_peer(when):
    error, notes = tried(ours_fails=when)
    assert isinstance(error, contest.OursFailed)
    assert notes[-2:] == ["ours stops", "theirs stops"]


def test_the_median_of_the_runs_counts_and_all_are_written():
    row = Row(
        work="W1", figure="decode tok/s", ours_is="a", peer="b", peer_is="c", ours=350.2,
        theirs=150.0, bar=Bar(2.2), runs=([1.0, 350.2, 400.0], [150.0]), cpu=(2.0, 4.0),
    )  # fmt: skip
    assert table([row]).splitlines()[1].split() == [
        *("W1", "decode", "tok/s", "350", "b", "(c)", "150", "0.50", "2.33", "≥", "2.2", "holds"),
    ]
    (written,) = json.loads(json.dumps(as_json([row])))
    assert written["ratio"] == pytest.approx(350.2 / 150)
    assert written["drumline_runs"] == [1.0, 350.2, 400.0]
    assert written["bar"] == "≥ 2.2"


def test_every_contest_is_of_works_and_figures_that_there_are():
    for each in CONTESTS:
        assert set(each.works) <= set(WORKS)
        assert {figure for bars in each.bars.values() for figure in bars} <= set(FIGURES)


CHATTY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
print("cannot find the weights", file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_a_silent_process_is_reported_and_ended_with_all_below_it(tmp_path):
    child = Child([sys.executable, "-c", CHATTY], {}, tmp_path / "log", spoken_with=True)
    try:
        below = int(child.line(30))
        with pytest.raises(PeerFailed, match=r"said nothing for 0 s: cannot find the weights"):
            child.line(0.3)
    finally:
        child.stop()
    assert not [pid for pid in (child.pid, below) if _runs(pid)]


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


DRIVER = """
import json, sys
print("{}", flush=True)
for line in sys.stdin:
    work = json.loads(line)
    if work["name"] == "breaks":
        sys.exit("no more memory")
    short = int(work["name"] == "short")
    answers = [{"began": 0, "stamps": [1], "counts": [n - short]} for n in work["tokens"]]
    print(json.dumps({"answers": answers}), flush=True)
"""


def test_a_driver_answers_works_until_it_breaks(tmp_path):
    driven = Driven([sys.executable, "-c", DRIVER], {}, tmp_path / "log")
    with pytest.raises(PeerFailed, match="is not started"):
        driven.measure(Work("x", [[1]], [3], [0.0]))
    driven.start()
    try:
        assert driven.measure(Work("x", [[1]], [3], [0.0])) == [Answer(0.0, [1.0], [3])]
        with pytest.raises(PeerFailed, match="an answer of short has 2 tokens, not 3"):
            driven.measure(Work("short", [[1]], [3], [0.0]))
        with pytest.raises(PeerFailed, match="ended: no more memory"):
            driven.measure(Work("breaks", [[1]], [3], [0.0]))
    finally:
        driven.stop()
        driven.stop()


PIP = """#!/bin/sh
case "$*" in
*pip*) echo "WARNING: no index"; echo "ERROR: No matching distribution for $6"; exit 1 ;;
*) echo "$3" >&2; exit 1 ;;
esac
"""


def test_a_peer_that_cannot_be_installed_says_what_pip_said(tmp_path):
    place = Place(tmp_path / "home", tmp_path / "logs", 1)
    python = place.python("none")
    python.parent.mkdir(parents=True)
    python.write_text(PIP)
    python.chmod(0o755)
    with pytest.raises(PeerFailed, match="cannot be installed: ERROR: No matching"):
        install(place, "none", ["no-such-engine==1.0"], limit_s=60)
    assert "WARNING: no index" in (tmp_path / "logs/none-install.log").read_text()


def test_a_peer_that_is_installed_is_not_installed_again(tmp_path):
    place = Place(tmp_path / "home", tmp_path / "logs", 1)
    python = place.python("there")
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    version = importlib.metadata.version("psutil")
    assert install(place, "there", [f"psutil=={version}"], limit_s=60) == version
    assert not (tmp_path / "logs").exists()
