"""What a start costs: a second `drumline generate` to its first token, and an idle server's memory.

    python -m benchmarks.startup [--json FILE] [--runs 5] [--first-token-s 2.5] [--idle-mib 900]

The first figure runs from the command's start to the first byte of its answer, of a run whose files
are cached, the median of `--runs`; what its processes compute until their end stands beside it,
which a busy machine changes less. The second one is the proportional set size (PSS) of the whole
tree of `drumline serve`, from /proc, once it has served one request and rested. Fails where a
bound is not kept.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.programs import ProgramFailed, generated, memory_mib, served
from benchmarks.report import machine, write

REST_S = 3.0
ANSWER_S = 60.0


def idle() -> dict[str, dict[str, float]]:
    """Return the memory of a server's processes that has answered once."""
    with served() as server:
        body = {"prompt": "Hi", "max_tokens": 8}
        asked = httpx.post(f"{server.url}/v1/completions", json=body, timeout=ANSWER_S)
        asked.raise_for_status()
        time.sleep(REST_S)
        return memory_mib(server.tree)


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--first-token-s", type=float, default=2.5)
    arguments.add_argument("--idle-mib", type=float, default=900)
    asked = arguments.parse_args()
    report: dict[str, object] = {"benchmark": "startup", "machine": machine()}
    try:
        with tempfile.TemporaryDirectory() as logs:
            log = Path(logs) / "generate.log"
            generated(log)  # compiles kernels, and reads files that nobody has read
            runs = [generated(log) for _ in range(asked.runs)]
    except ProgramFailed as error:
        raise SystemExit(str(error)) from None
    took = statistics.median(each.first_s for each in runs)
    spent = statistics.median(each.processor_s for each in runs)
    best = min(each.first_s for each in runs)
    print(f"first token: {took:.2f} s (at best {best:.2f}), {spent:.2f} s of processor time")
    kept = took <= asked.first_token_s
    report["first_token_s"] = {
        "median": round(took, 3),
        "best": round(best, 3),
        "processor": round(spent, 3),
        "bound": asked.first_token_s,
    }
    if Path("/proc/self/smaps_rollup").exists():
        processes = idle()
        whole = sum(sizes["Pss"] for sizes in processes.values())
        for name, sizes in processes.items():
            print(f"  {name:<28}" + "".join(f"{kind} {mib:>7} " for kind, mib in sizes.items()))
        print(f"idle: {whole:.0f} MiB")
        kept &= whole <= asked.idle_mib
        report["idle_mib"] = {"whole": round(whole), "bound": asked.idle_mib, **processes}
    else:
        print("idle: this system does not tell what is shared")
    if not kept:
        print("a bound is not kept", file=sys.stderr)
    write(report, asked.json)
    return not kept


if __name__ == "__main__":
    sys.exit(main())
