"""What this machine's processor can do."""

import platform
from pathlib import Path


def instruction_sets() -> frozenset[str]:
    """Return the names Linux has for the processor's instruction sets; none elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.is_file():
        return frozenset()
    with cpuinfo.open() as lines:
        flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
