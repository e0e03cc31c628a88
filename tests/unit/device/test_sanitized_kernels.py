"""Kernels touch no memory but their own, and no two threads the same: as sanitizers see it."""

import os
import shutil
import subprocess
import sys

import pytest

from drumline.device.kernels.compiling import VARIANTS, Variant, compiled
from drumline.device.kernels.processor import instruction_sets

TRY = """
import sys
from pathlib import Path
from drumline.device.kernels.native import Kernels
from drumline.device.kernels.trial import tried
sys.exit(tried(Kernels("sanitized", Path(sys.argv[1]))))
"""
pytestmark = pytest.mark.skipif(
    "DRUMLINE_SOAK_SANITIZERS" not in os.environ, reason="compiles for minutes; see `make soak`"
)


@pytest.mark.parametrize(
    ("sanitizers", "library"), [("address,undefined", "libasan.so"), ("thread", "libtsan.so")]
)
def test_sanitizers_find_nothing_in_a_trial(tmp_path, sanitizers, library):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    asked = [compiler, f"-print-file-name={library}"]
    runtime = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip(f"g++ comes without {library}")
    best = next(variant for variant in VARIANTS if variant.needs <= instruction_sets())
    wanted = ("-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    built = compiled(Variant("sanitized", best.needs, (*best.flags, *wanted)), tmp_path)
    environment = {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "OPENBLAS_NUM_THREADS": "1",  # whose threads no sanitizer was told of
    }
    ran = subprocess.run(
        [sys.executable, "-c", TRY, built],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
