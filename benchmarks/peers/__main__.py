"""Measure drumline beside its peers; print a table and write the figures as JSON.

    python -m benchmarks.peers [PEER …] [--quick] [--works W1 W4 …] [--runs N] [--json FILE]

Peers are openvino, llama.cpp and vllm; by default openvino and those that are installed. Each is
installed into an environment of its own under `--home` if it is not there; one that cannot be
installed or fails is reported by name and reason, and the others go on. `own` measures what
drumline is held to by itself. The exit status is 0 if everything could be measured, whatever the
bars say.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from benchmarks.peers import contest, own
from benchmarks.peers.bars import CONTESTS, Contest
from benchmarks.peers.drumline import Drumline
from benchmarks.peers.engine import Peer, PeerFailed
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.openvino import OpenVino
from benchmarks.peers.place import Place, default_home
from benchmarks.peers.report import Row, as_json, table
from benchmarks.peers.vllm import Vllm
from benchmarks.peers.work import WORKS, Sizes
from benchmarks.report import machine
from drumline.core.version import VERSION

PEERS: dict[str, Callable[[Place], Peer]] = {
    "openvino": OpenVino,
    "llama.cpp": LlamaCpp,
    "vllm": Vllm,
}
OWN = "own"
_WORKS = [name for name in WORKS if name.startswith("W")]
RESULTS = Path(__file__).parents[1] / "results"
_QUICK_SECONDS = 8.0


def main() -> int:
    options = _options()
    # So that engines are stopped, whoever stops this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    place = Place(options.home, options.json.parent / "peers", options.threads)
    sizes = Sizes(seconds=_QUICK_SECONDS) if options.quick else Sizes()
    runs = options.runs or (3 if options.quick else 5)
    report: dict[str, object] = {
        "benchmark": "peers",
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "threads": place.threads,
        "runs": runs,
        "quick": options.quick,
        "python": platform.python_version(),
    }
    versions = {"drumline": VERSION}
    rows: list[Row] = []
    complete = True
    for name in options.peers:
        say(name)
        try:
            if name == OWN:
                measured, whole = _own(place, runs, sizes)
            else:
                measured, whole = _peer(place, name, options.works, runs, sizes, versions)
        except contest.OursFailed as error:
            say(f"  {error}")
            complete = False
            break
        rows += measured
        complete &= whole
        # After each, as the next ones may take an hour and be broken off.
        report |= {"versions": versions, "rows": as_json(rows)}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        print(table(measured), flush=True)
    say(f"written to {options.json}")
    return not complete


def _peer(
    place: Place,
    name: str,
    works: Sequence[str],
    runs: int,
    sizes: Sizes,
    versions: dict[str, str],
) -> tuple[list[Row], bool]:
    """Return a peer's rows, and whether all of them could be measured."""
    peer, ours = PEERS[name](place), Drumline(place)
    contests = [
        only for each in CONTESTS if each.peer == name and (only := _only(each, works)).bars
    ]
    try:
        versions[name] = peer.install()
    except PeerFailed as error:
        say(f"  {error}")
        return [row for each in contests for row in contest.unmeasured(each, str(error))], False
    rows: list[Row] = []
    for each in contests:
        say(f" drumline ({each.ours}) and {name} ({each.theirs})")
        try:
            theirs = peer.engine(each.theirs)
            rows += contest.run(each, ours.engine(each.ours), theirs, runs, sizes, say)
        except PeerFailed as error:
            say(f"  {error}")
            rows += contest.unmeasured(each, str(error))
    return rows, not any(row.failed for row in rows)


def _own(place: Place, runs: int, sizes: Sizes) -> tuple[list[Row], bool]:
    rows: list[Row] = []
    whole = True
    for measure in (
        lambda: own.contexts(place, runs, sizes),
        lambda: own.start(place, runs),
        lambda: own.memory(place, sizes),
        lambda: own.control(place, sizes),
    ):
        try:
            rows += measure()
        except PeerFailed as error:
            say(f"  {error}")
            whole = False
    return rows, whole


def _only(contest_: Contest, works: Sequence[str]) -> Contest:
    """Return a contest with the works that were asked for."""
    kept = {name: bars for name, bars in contest_.bars.items() if name.split()[0] in works}
    return replace(contest_, bars=kept)


def say(line: str) -> None:
    print(line, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__.splitlines()[0]
    )
    known = [*PEERS, OWN]
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="three runs, eight seconds of W6")
    parser.add_argument("--runs", type=int, help="of which the medians are; 5 by default")
    parser.add_argument("--works", nargs="+", choices=_WORKS, default=_WORKS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--home", type=Path, default=default_home(), help="where peers lie")
    parser.add_argument("--json", type=Path, default=RESULTS / "peers.json")
    options = parser.parse_args()
    place = Place(options.home, options.json.parent / "peers", options.threads)
    there = [name for name in PEERS if name == "openvino" or place.python(name).is_file()]
    options.peers = options.peers or [*there, OWN]
    unknown = sorted(set(options.peers) - set(known))
    if unknown:
        parser.error(f"there is no peer {', '.join(unknown)}; there are {', '.join(known)}")
    return options


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
