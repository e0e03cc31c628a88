"""How long an exchange takes: all-gather of 64 bytes among processes on loopback.

    python -m benchmarks.collective [--json FILE] [--runs 5] [--check]

Every member is a process of its own. Back to back, a member enters the next exchange as soon as
it has the last one's result; after idle, all sleep 10 ms in between. A run's figure is the p50
of its slowest member; the table shows the median over the runs. `bare` is the same star on
plain sockets, with nothing but a send and a receive a message: what the machine itself takes.
Both take turns in one run, so that whatever else the machine does slows both, and `ratio` is
what the mesh adds; `added CPU` is that in a member's processor time, which other work disturbs
less. With --check the exit status tells whether the bars hold, of p50 or, on a
machine that is slower than they suppose even for bare sockets, of the ratio.
"""

import argparse
import json
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.report import machine, write
from drumline.collective.mesh import join
from drumline.collective.rendezvous import connect
from drumline.collective.settings import MeshSettings, Seat
from drumline.core.clock import SystemClock

BARS_US = {2: 80.0, 4: 100.0, 8: 200.0}
BARE_US = {2: 26.0, 4: 83.0, 8: 208.0}
"""What bare sockets took where the bars were set: two cores for all members."""
PAYLOAD_BYTES = 64
WARM_UP = 200
TURNS = 8
BACK_TO_BACK = 250
"""Exchanges of a turn."""
AFTER_IDLE = 50
IDLE_S = 0.01


def member(seat: Seat) -> None:
    """Be one process of a run; prints its figures, in µs, as one line of JSON."""
    payload = bytes(PAYLOAD_BYTES)
    with join(seat, MeshSettings(), SystemClock()) as mesh:
        group = mesh.group(range(seat.size))
        group.all_gather(b"before the address is used again")
        bare = Bare(seat)
        for _ in range(WARM_UP):
            group.all_gather(payload)
            bare.all_gather()
        packed: list[float] = []
        stripped: list[float] = []
        cpu_s = bare_cpu_s = 0.0
        for _ in range(TURNS):
            group.all_gather(b"all are here")
            start_s = time.process_time()
            packed += timed(lambda: group.all_gather(payload), BACK_TO_BACK)
            cpu_s += time.process_time() - start_s
            start_s = time.process_time()
            stripped += timed(bare.all_gather, BACK_TO_BACK)
            bare_cpu_s += time.process_time() - start_s
        spread = []
        for _ in range(AFTER_IDLE):
            time.sleep(IDLE_S)
            spread += timed(lambda: group.all_gather(payload), 1)
        group.all_gather(b"all are done")
    print(
        json.dumps(
            {
                "p50_us": statistics.median(packed),
                "p99_us": statistics.quantiles(packed, n=100)[98],
                "cpu_us": cpu_s * 1e6 / len(packed),
                "after_idle_p50_us": statistics.median(spread),
                "bare_p50_us": statistics.median(stripped),
                "added_cpu_us": (cpu_s - bare_cpu_s) * 1e6 / len(packed),
            }
        )
    )


def timed(exchange: Callable[[], object], times: int) -> list[float]:
    """Return how long each of some exchanges takes, in µs."""
    taken = []
    for _ in range(times):
        start = time.perf_counter_ns()
        exchange()
        taken.append((time.perf_counter_ns() - start) / 1e3)
    return taken


class Bare:
    """The same star on plain sockets, which checks nothing."""

    def __init__(self, seat: Seat) -> None:
        links = connect(seat, MeshSettings(), SystemClock())
        for line in links.lines.values():
            line.settimeout(None)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The pulses stay open as long as the lines.
        self._links = links
        self._first = links.lines.get(0)
        self._peers = [links.lines[rank] for rank in sorted(links.lines)]
        self._up, self._down = bytes(PAYLOAD_BYTES), bytes(PAYLOAD_BYTES * seat.size)

    def all_gather(self) -> None:
        """Exchange once."""
        if self._first is not None:
            self._first.send(self._up)
            self._first.recv(4096)
            return
        for peer in self._peers:
            peer.recv(4096)
        for peer in self._peers:
            peer.send(self._down)


def run(size: int) -> dict[str, float]:
    """Return one run's figures: of each the slowest member's, but of what is added the mean."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    token = secrets.token_bytes(16)
    processes = []
    for index in range(size):
        seat = msgspec.json.encode(Seat(index, size, address, token)).decode()
        command = [sys.executable, "-m", "benchmarks.collective", "--seat", seat]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        sys.exit(f"a member of {size} failed")
    figures = [json.loads(output) for output in outputs]
    run = {name: max(figure[name] for figure in figures) for name in figures[0]}
    run["added_cpu_us"] = statistics.mean(figure["added_cpu_us"] for figure in figures)
    return run


def main() -> None:
    """Measure every size, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(BARS_US))
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    parser.add_argument("--seat", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.seat:
        member(msgspec.json.decode(arguments.seat, type=Seat))
        return
    report: dict[str, object] = {
        "benchmark": "collective",
        "machine": machine(),
        "payload_bytes": PAYLOAD_BYTES,
        "runs": arguments.runs,
    }
    missed = False
    sizes: dict[str, dict[str, float | list[float]]] = {}
    print(
        "members  p50 µs  (runs)                     bar   p99  CPU µs  after idle    bare  ratio"
        "  added CPU µs"
    )
    for size in arguments.sizes:
        runs = [run(size) for _ in range(arguments.runs)]
        for figures in runs:
            figures["ratio"] = figures["p50_us"] / figures["bare_p50_us"]
        medians = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
        bar = BARS_US.get(size)
        if bar is not None and medians["p50_us"] > bar:
            missed |= medians["ratio"] > bar / BARE_US[size]
        p50s = sorted(round(r["p50_us"], 1) for r in runs)
        sizes[str(size)] = {
            **{name: round(value, 2) for name, value in medians.items()},
            "p50_us_runs": p50s,
        }
        print(
            f"{size:7}  {medians['p50_us']:6.1f}  {' '.join(map(str, p50s)):25}  "
            f"{bar or '-':>5}  {medians['p99_us']:6.0f}  {medians['cpu_us']:6.1f}  "
            f"{medians['after_idle_p50_us']:10.0f}  {medians['bare_p50_us']:6.1f}  "
            f"{medians['ratio']:5.2f}  {medians['added_cpu_us']:12.1f}"
        )
    report["members"] = sizes
    write(report, arguments.json)
    if arguments.check and missed:
        sys.exit("a bar is missed")


if __name__ == "__main__":
    main()
