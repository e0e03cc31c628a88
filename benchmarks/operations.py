"""What operations on a running server take: a load of weights, sleep and wake, a pause.

    python -m benchmarks.operations [--json FILE] [--repeat 5] [--model MODEL]

A server of the embedded model is loaded anew from its own file, put to sleep and woken, and
paused while a request runs. Of a load both the time and the processors' time of server and
rank are told: on a machine that others use as well only the latter says what a load costs.
Exits with 1 where a figure is beyond what the project promises: 3 s of processor time for a
load (and of time, unless `--busy` says that others compute beside it), and 3 % of a core for
an engine that is frozen. That a pause with mode `keep` is answered within two rounds is
simulated (`tests/sim/test_memory_release.py`); here is what a client sees of it.
"""

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.programs import Server, served
from benchmarks.report import machine, write
from drumline.core.model_files import find_model

LOAD_S, FROZEN_SHARE = 3.0, 0.03
WATCHED_S = 10.0


def processor_s(tree: list[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in tree)


def done(http: httpx.Client, path: str, **fields: object) -> None:
    reply = http.post(path, json=fields)
    if reply.status_code != 200:
        raise SystemExit(f"{path}: {reply.text}")


def timed(
    http: httpx.Client, tree: list[psutil.Process], path: str, **fields: object
) -> dict[str, float]:
    before, began = processor_s(tree), time.perf_counter()
    done(http, path, **fields)
    return {"s": time.perf_counter() - began, "processor_s": processor_s(tree) - before}


def paused_s(http: httpx.Client, url: str) -> float:
    """Return how long a pause took to answer that met a request at work, which it keeps."""
    body = {"prompt": "Drums", "max_tokens": 300, "ignore_eos": True}
    asking = threading.Thread(target=httpx.post, args=(f"{url}/v1/completions",),
                              kwargs={"json": body, "timeout": 600})  # fmt: skip
    asking.start()
    time.sleep(0.5)
    began = time.perf_counter()
    done(http, "/pause", mode="keep")
    took = time.perf_counter() - began
    state = http.get("/get_internal_state").json()["internal_states"][0]
    done(http, "/resume")
    asking.join()
    if (state["standing"], state["in_flight"], state["running"]) != ("kept", 0, 1):
        raise SystemExit(f"the pause met or left something else: {state}")
    return took


def frozen_share(http: httpx.Client, rank: psutil.Process) -> float:
    done(http, "/pause", mode="keep")
    before, began = processor_s([rank]), time.perf_counter()
    time.sleep(WATCHED_S)
    share = (processor_s([rank]) - before) / (time.perf_counter() - began)
    done(http, "/resume")
    return share


def measured(server: Server, options: argparse.Namespace) -> dict[str, object]:
    path = str(find_model(options.model).path)
    with httpx.Client(base_url=server.url, timeout=600) as http:
        tree = server.tree
        (rank,) = tree[1:]
        rows: dict[str, list[dict[str, float]]] = {"load": [], "sleep": [], "wake": []}
        for _ in range(options.repeat):
            rows["load"].append(timed(http, tree, "/update_weights_from_disk", model_path=path))
            rows["sleep"].append(timed(http, tree, "/sleep"))
            rows["wake"].append(timed(http, tree, "/wake_up"))
        pauses = [paused_s(http, server.url) for _ in range(options.repeat)]
        share = frozen_share(http, rank)
    report: dict[str, object] = {}
    for name, each in rows.items():
        for what in ("s", "processor_s"):
            values = [one[what] for one in each]
            report[f"{name}_{what}"] = round(statistics.median(values), 3)
            report[f"{name}_{what}_most"] = round(max(values), 3)
    return report | {
        "pause_s": round(statistics.median(pauses), 3),
        "frozen_share": round(share, 4),
    }


def beyond(report: dict[str, object], *, busy: bool) -> list[str]:
    """Return what is more than was promised."""
    limits = {"load_processor_s": LOAD_S, "frozen_share": FROZEN_SHARE}
    if not busy:
        limits["load_s"] = LOAD_S
    return [f"{name} {report[name]} is over {most}" for name, most in limits.items()
            if float(str(report[name])) > most]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--model", help="the embedded one by default")
    parser.add_argument("--busy", action="store_true", help="others use this machine as well")
    options = parser.parse_args()
    with served([options.model] if options.model else []) as server:
        report = measured(server, options)
    for name, value in report.items():
        print(f"{name:>24}  {value}")
    wrong = beyond(report, busy=options.busy)
    print("\n".join(wrong) or "all as promised")
    about = {"benchmark": "operations", "machine": machine()}
    write(about | report | {"beyond": wrong}, options.json)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
