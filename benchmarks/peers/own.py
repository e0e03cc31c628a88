"""What drumline is held to by itself: long contexts, its start, its memory, its control plane.

Each has a bar that is a number, or a multiple of another figure of its own.
"""

import gzip
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from benchmarks.peers.bars import Bar
from benchmarks.peers.drumline import Drumline
from benchmarks.peers.engine import PeerFailed, Side
from benchmarks.peers.figures import FIGURES
from benchmarks.peers.place import Place
from benchmarks.peers.report import Row
from benchmarks.peers.served import Served
from benchmarks.peers.work import WARM, WORKS, Sizes
from benchmarks.programs import ProgramFailed, generated, memory_mib

_CONTEXTS = Bar(2.2, most=True)
_START_S = Bar(2.5, most=True)
_IDLE_MB = Bar(900.0, most=True)
_CONTROL_SHARE = Bar(0.05, most=True)
_SETTLED_S = 3.0
_TRACE_S = 120.0
_FORWARDS = 64
_LEAST_FORWARDS = 8


def _row(work: str, figure: str, value: float, bar: Bar, runs: Sequence[float] = ()) -> Row:
    return Row(
        work=work,
        figure=figure,
        ours_is=str(Side()),
        peer="itself",
        peer_is="1",
        ours=value,
        theirs=1.0,
        bar=bar,
        runs=(list(runs), []),
    )


def contexts(place: Place, runs: int, sizes: Sizes) -> list[Row]:
    """Compare the step of a lone answer behind 4,096 tokens with that behind 256."""
    engine = Drumline(place).engine(Side())
    short, long = "context 256", "context 4096"
    taken: dict[str, list[float]] = {short: [], long: []}
    try:
        engine.start()
        engine.measure(WARM(sizes, 0)[0])
        for index in range(runs):
            for name in (short, long) if index % 2 == 0 else (long, short):
                (work,) = WORKS[name](sizes, index)
                taken[name].append(FIGURES["step ms"](work, engine.measure(work)))
    finally:
        engine.stop()
    return [
        Row(
            work=long,
            figure="step ms",
            ours_is=str(Side()),
            peer="itself",
            peer_is=short,
            ours=statistics.median(taken[long]),
            theirs=statistics.median(taken[short]),
            bar=_CONTEXTS,
            runs=(taken[long], taken[short]),
        )
    ]


def start(place: Place, runs: int) -> list[Row]:
    """Time `drumline generate Hi --max-tokens 1` from its start to its first token.

    The first of all fills caches and does not count. The token is what comes first on standard
    output.
    """
    log = place.logs / "generate.log"
    try:
        taken = [generated(log).first_s for _ in range(runs + 1)][1:]
    except ProgramFailed as error:
        raise PeerFailed(str(error)) from error
    return [_row("second generate", "first token s", statistics.median(taken), _START_S, taken)]


def memory(place: Place, sizes: Sizes) -> list[Row]:
    """Weigh a server that has answered and rests."""
    engine = Drumline(place).engine(Side(http=True))
    try:
        engine.start()
        engine.measure(WARM(sizes, 0)[0])
        time.sleep(_SETTLED_S)
        return [_row("idle", "PSS MB", _tree_mb(engine.pid), _IDLE_MB)]
    finally:
        engine.stop()


def control(place: Place, sizes: Sizes) -> list[Row]:
    """Trace 16 answers for the part of a step in which the forward thread does not compute."""
    with tempfile.TemporaryDirectory() as traces:
        engine = Drumline(place, profile_dir=traces).engine(Side(http=True))
        assert isinstance(engine, Served)
        try:
            engine.start()
            engine.measure(WARM(sizes, 0)[0])
            share = _control_share(engine, Path(traces), sizes)
        finally:
            engine.stop()
    return [_row("16 answers", "control share", share, _CONTROL_SHARE)]


def _tree_mb(pid: int) -> float:
    """Return what a process and those below it hold, each shared page's part counted once."""
    root = psutil.Process(pid)
    sizes = memory_mib([root, *root.children(recursive=True)])
    return sum(each["Pss"] for each in sizes.values()) * 2**20 / 1e6


def _control_share(engine: Served, traces: Path, sizes: Sizes) -> float:
    """Return the part of a decode step's time for which the forward thread does not compute.

    Of steps with all answers in them, traced without stacks. Between two pieces of a trace the
    rank writes, which is no step: the gap that counts is the median one.
    """
    (work,) = WORKS["W2"](sizes, 0)
    with httpx.Client(base_url=f"http://127.0.0.1:{engine.port}", timeout=60) as client:
        asked = {"num_steps": _FORWARDS, "activities": ["CPU"], "with_stack": False}
        client.post("/start_profile", json=asked | {"profile_id": "control"}).raise_for_status()
        engine.measure(work)
    deadline = time.perf_counter() + _TRACE_S
    while not (found := list(traces.glob("control*.gz"))):
        if time.perf_counter() > deadline:
            raise PeerFailed(f"no trace was written within {_TRACE_S:.0f} s")
        time.sleep(0.1)
    rows = len(work.prompts)
    spans = _decode_spans(found[0], rows)
    if len(spans) < _LEAST_FORWARDS:
        raise PeerFailed(f"the trace has only {len(spans)} decode steps of {rows} rows")
    step = statistics.median(b[0] - a[0] for a, b in itertools.pairwise(spans))
    computed = statistics.median(end - begin for begin, end in spans)
    return max(0.0, step - computed) / step


def _decode_spans(trace: Path, rows: int) -> list[tuple[float, float]]:
    """Return when the forwards of a trace that only decode `rows` rows began and ended, in us."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    what = f": DECODE, {rows} rows, "
    return sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and what in event["name"]
    )
