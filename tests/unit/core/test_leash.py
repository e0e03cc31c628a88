"""Commands that end with whoever wanted them, and with them what they started."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drumline.core.leash import TooLongError, run_leashed

STARTS_ANOTHER = (
    "import os, subprocess, sys\n"
    "child = subprocess.Popen(['sleep', '60'])\n"
    "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid}\\n')\n"
    "child.wait()\n"
)
WANTS = (
    "import sys\n"
    "from drumline.core.leash import run_leashed\n"
    "run_leashed([sys.executable, *sys.argv[1:]], 60)\n"
)


def told(path: Path) -> list[int]:
    """Return the processes that a command says it has, once it does."""
    for _ in range(400):
        if path.exists() and path.read_text().endswith("\n"):
            return [int(pid) for pid in path.read_text().split()]
        time.sleep(0.05)
    raise AssertionError("the command never began")


def all_gone(pids: list[int]) -> bool:
    def runs(pid: int) -> bool:
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    for _ in range(100):
        if not any(map(runs, pids)):
            return True
        time.sleep(0.05)
    return False


def test_a_command_ends_with_its_status_and_what_it_said():
    script = "import sys; print('out'); sys.stderr.write('no such file'); sys.exit(3)"
    assert run_leashed([sys.executable, "-c", script], 30) == (3, "no such file")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_command_dies_with_whoever_is_killed_that_wanted_it_and_all_it_started(tmp_path):
    script, said = tmp_path / "starts.py", tmp_path / "pids"
    script.write_text(STARTS_ANOTHER)
    wanting = subprocess.Popen([sys.executable, "-c", WANTS, str(script), str(said)])
    pids = told(said)
    wanting.kill()
    wanting.wait(10)
    assert all_gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_command_that_takes_too_long_is_killed_with_what_it_started(tmp_path):
    script, said = tmp_path / "starts.py", tmp_path / "pids"
    script.write_text(STARTS_ANOTHER)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TooLongError):
        run_leashed([sys.executable, str(script), str(said)], 2.0)
    assert all_gone(told(said))
    assert len(os.listdir("/proc/self/fd")) == before
