"""What every benchmark's figures come with: the machine they are from, and a file of JSON."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from drumline.core.version import VERSION


def machine(*packages: str) -> dict[str, object]:
    """Name this machine and the versions of `packages`.

    `load` is what else runs when this is asked: with others beside, only ratios mean anything.
    """
    return {
        "processor": _processor(),
        "cores": _cores(),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "drumline": VERSION,
        **{name: importlib.metadata.version(name) for name in packages},
    }


def write(report: Mapping[str, object], file: Path | None) -> None:
    """Write a report as JSON, where a file was asked for."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int:
    """Return how many cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
