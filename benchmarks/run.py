"""`make bench`: run the benchmarks, print their tables, write their figures.

    python -m benchmarks.run [NAME …]

Every other module of this folder is a benchmark that takes `--json FILE`, but those in SHARED.
Each runs in a process of its own, and its figures go to `benchmarks/results/NAME.json`, the
machine among them.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SHARED = {"__init__", "programs", "report", "run"}
NAMES = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in SHARED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    names = parser.parse_args().names or NAMES
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    RESULTS.mkdir(exist_ok=True)
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        began = time.perf_counter()
        file = RESULTS / f"{name}.json"
        status = subprocess.call([sys.executable, "-m", f"benchmarks.{name}", "--json", file])
        if status:
            failed.append(name)
        print(f"   {time.perf_counter() - began:.0f} s, {file}\n", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
