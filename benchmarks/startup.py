"""What a start costs: a second `drumline generate` to its first token, and an idle server's memory.

    python benchmarks/startup.py [--json FILE] [--runs 5] [--first-token-s 2.5] [--idle-mib 900]

The first figure runs from the command's start to the first byte of its answer, of a run whose files
are cached, the median of `--runs`; what its processes compute until their end stands beside it,
which a busy machine changes less. The second one is the proportional set size (PSS) of the whole
tree of `drumline serve`, from /proc, once it has served one request and rested. Fails where a
bound is not kept.
"""

import argparse
import contextlib
import json
import os
import platform
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

REST_S = 3.0
LONGEST_S = 180.0
COMMAND = (sys.executable, "-m", "drumline")


def first_token():
    """Return seconds to the first byte of an answer, and the processes' seconds to their end."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    command = [*COMMAND, "generate", "Hi", "--max-tokens", "1", "--temperature", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        byte = run.stdout.read(1)
        took = time.monotonic() - began
        run.stdout.read()
    if run.returncode or not byte.strip():
        raise SystemExit(f"generate ended with status {run.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime - spent.ru_utime + after.ru_stime - spent.ru_stime


def tree(pid):
    """Return the processes that descend from `pid`, itself among them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(stat[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def memory(pid):
    """Return a process's name and the MiB that are its part of what is resident, by kind."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in rollup[1:] if line.endswith("kB")}
    name = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    of_kind = {kind: sizes[kind] / 1024 for kind in ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")}
    return name, {kind: round(mib, 1) for kind, mib in of_kind.items()}


def idle():
    """Return the memory of a server's processes that has answered once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*COMMAND, "serve", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        for line in server.stdout:
            if "ready on" in line:
                break
        else:
            raise SystemExit("the server ended before it was ready")
        body = json.dumps({"prompt": "Hi", "max_tokens": 8}).encode()
        ask = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            body,
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(ask, timeout=LONGEST_S).read()
        time.sleep(REST_S)
        return dict(memory(pid) for pid in tree(server.pid))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(LONGEST_S)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--first-token-s", type=float, default=2.5)
    arguments.add_argument("--idle-mib", type=float, default=900)
    asked = arguments.parse_args()
    first_token()  # compiles kernels, and reads files that nobody has read
    runs = [first_token() for _ in range(asked.runs)]
    took, spent = (statistics.median(values) for values in zip(*runs, strict=True))
    print(
        f"first token: {took:.2f} s (at best {min(runs)[0]:.2f}), {spent:.2f} s of processor time"
    )
    kept = took <= asked.first_token_s
    report = {
        "benchmark": "startup",
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load": os.getloadavg()[0],
        },
        "first_token_s": {
            "median": round(took, 3),
            "best": round(min(runs)[0], 3),
            "processor": round(spent, 3),
            "bound": asked.first_token_s,
        },
    }
    if Path("/proc/self/smaps_rollup").exists():
        processes = idle()
        whole = sum(sizes["Pss"] for sizes in processes.values())
        for name, sizes in processes.items():
            print(f"  {name:<28}" + "".join(f"{kind} {mib:>7} " for kind, mib in sizes.items()))
        print(f"idle: {whole:.0f} MiB")
        kept &= whole <= asked.idle_mib
        report["idle_mib"] = {"whole": round(whole), "bound": asked.idle_mib} | processes
    else:
        print("idle: this system does not tell what is shared")
    if not kept:
        print("a bound is not kept", file=sys.stderr)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    return not kept


if __name__ == "__main__":
    sys.exit(main())
