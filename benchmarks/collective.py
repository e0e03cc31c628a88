"""How long an exchange takes: all-gather of 64 bytes among processes on loopback.

    python benchmarks/collective.py [--json FILE] [--runs 5] [--check]

Every member is a process of its own. Back to back, a member enters the next exchange as soon as
it has the last one's result; after idle, all sleep 10 ms in between. A run's figure is the p50
of its slowest member; the table shows the median over the runs. `bare` is the same star on
plain sockets, with nothing but a send and a receive a message: what the machine itself takes.
With --check the exit status tells whether the bars hold.
"""

import argparse
import json
import os
import platform
import secrets
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from drumline.collective.mesh import join
from drumline.collective.rendezvous import connect
from drumline.collective.settings import MeshSettings, Seat
from drumline.core.clock import SystemClock

BARS_US = {2: 80.0, 4: 100.0, 8: 200.0}
PAYLOAD_BYTES = 64
WARM_UP = 200
BACK_TO_BACK = 2000
AFTER_IDLE = 50
IDLE_S = 0.01


def member(seat: Seat) -> None:
    """Be one process of a run; prints its figures, in µs, as one line of JSON."""
    payload = bytes(PAYLOAD_BYTES)
    with join(seat, MeshSettings(), SystemClock()) as mesh:
        group = mesh.group(range(seat.size))
        for _ in range(WARM_UP):
            group.all_gather(payload)
        packed = []
        cpu_start = time.process_time()
        for _ in range(BACK_TO_BACK):
            start = time.perf_counter_ns()
            group.all_gather(payload)
            packed.append((time.perf_counter_ns() - start) / 1e3)
        cpu_us = (time.process_time() - cpu_start) * 1e6 / BACK_TO_BACK
        spread = []
        for _ in range(AFTER_IDLE):
            time.sleep(IDLE_S)
            start = time.perf_counter_ns()
            group.all_gather(payload)
            spread.append((time.perf_counter_ns() - start) / 1e3)
        group.all_gather(b"before the address is used again")
    bare_us = bare(seat)
    print(
        json.dumps(
            {
                "p50_us": statistics.median(packed),
                "p99_us": statistics.quantiles(packed, n=100)[98],
                "cpu_us": cpu_us,
                "after_idle_p50_us": statistics.median(spread),
                "bare_p50_us": bare_us,
            }
        )
    )


def bare(seat: Seat) -> float:
    """Return the p50 of the same star on plain sockets, in µs."""
    links = connect(seat, MeshSettings(), SystemClock())
    peers = [links.lines[rank] for rank in sorted(links.lines)] if seat.index == 0 else []
    first = links.lines.get(0)
    for line in links.lines.values():
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    up, down = bytes(PAYLOAD_BYTES), bytes(PAYLOAD_BYTES * seat.size)
    taken = []
    for _ in range(BACK_TO_BACK):
        start = time.perf_counter_ns()
        if first is not None:
            first.send(up)
            first.recv(4096)
        for peer in peers:
            peer.recv(4096)
        for peer in peers:
            peer.send(down)
        taken.append((time.perf_counter_ns() - start) / 1e3)
    links.close()
    return statistics.median(taken)


def run(size: int) -> dict[str, float]:
    """Return one run's figures: of each, the slowest member's."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    token = secrets.token_bytes(16)
    processes = []
    for index in range(size):
        seat = msgspec.json.encode(Seat(index, size, address, token)).decode()
        command = [sys.executable, __file__, "--seat", seat]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        sys.exit(f"a member of {size} failed")
    figures = [json.loads(output) for output in outputs]
    return {name: max(figure[name] for figure in figures) for name in figures[0]}


def machine() -> dict[str, object]:
    """Name the machine that the figures are from."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0].partition(":")[2].strip() if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_1m": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


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
    print("members  p50 µs  (runs)                     bar   p99  CPU µs  after idle    bare")
    for size in arguments.sizes:
        runs = [run(size) for _ in range(arguments.runs)]
        medians = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
        bar = BARS_US.get(size)
        missed |= bar is not None and medians["p50_us"] > bar
        p50s = sorted(round(r["p50_us"], 1) for r in runs)
        sizes[str(size)] = {
            **{name: round(value, 1) for name, value in medians.items()},
            "p50_us_runs": p50s,
        }
        print(
            f"{size:7}  {medians['p50_us']:6.1f}  {' '.join(map(str, p50s)):25}  "
            f"{bar or '-':>5}  {medians['p99_us']:6.0f}  {medians['cpu_us']:6.1f}  "
            f"{medians['after_idle_p50_us']:10.0f}  {medians['bare_p50_us']:6.1f}"
        )
    report["members"] = sizes
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.check and missed:
        sys.exit("a bar is missed")


if __name__ == "__main__":
    main()
