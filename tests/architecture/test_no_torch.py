"""Processes that hold no tensors load no tensor library, not even through another one."""

import subprocess
import sys

import pytest

IMPORT_ALL = """
import importlib, pkgutil, sys
room = importlib.import_module("drumline." + sys.argv[1])
for found in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
    importlib.import_module(found.name)
print(*sorted({"torch", "transformers"} & sys.modules.keys()))
"""


@pytest.mark.parametrize("room", ["frontend", "client", "control", "launcher", "offline", "cli"])
def test_importing_all_of_a_room_loads_no_torch(room):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, room], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
