"""Where peers, their models and their logs lie, and virtual environments of their own.

A peer is never installed beside drumline: it brings another torch, numpy or compiler run.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from benchmarks.peers.engine import PeerFailed

_VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
_ASKING_S = 60.0


class Place(Struct, frozen=True):
    """Directories, and how many threads every engine computes with."""

    home: Path
    """What is installed and made lies here and is found again."""
    logs: Path
    threads: int

    def python(self, name: str) -> Path:
        """Return the interpreter of a peer's environment."""
        return self.home / name / "bin" / "python"

    @property
    def env(self) -> dict[str, str]:
        """What every engine's process finds in its environment."""
        return {
            "OMP_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }


def default_home() -> Path:
    """Return the folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "drumline" / "peers"


def install(
    place: Place,
    name: str,
    packages: Sequence[str],
    *,
    limit_s: float,
    unwanted: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> str:
    """Install pinned packages into an environment of their own, unless they are there.

    `unwanted` are dependencies that are taken out again. Returns the version of the first package.
    Raises PeerFailed with what pip said last.
    """
    python = place.python(name)
    wanted, _, version = packages[0].partition("==")
    if _installed(python, wanted) == version:
        return version
    print(f"installing {' '.join(packages)} into {place.home / name}", flush=True)
    log = place.logs / f"{name}-install.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    commands: list[list[str | Path]] = [
        [sys.executable, "-m", "venv", place.home / name],
        [python, "-m", "pip", "install", "--quiet", "--progress-bar", "off", *packages],
    ]
    if unwanted:
        commands.append([python, "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted])
    with log.open("wb") as out:
        for command in commands[python.is_file() :]:
            left = limit_s - (time.perf_counter() - began)
            try:
                status = subprocess.run(
                    command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **(env or {})},
                    timeout=max(1.0, left),
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                raise PeerFailed(f"was not installed within {limit_s:.0f} s; see {log}") from None
            if status:
                raise PeerFailed(f"cannot be installed: {_last_error(log)}; see {log}")
    found = _installed(python, wanted)
    if found != version:
        raise PeerFailed(f"was installed as {found}, not {version}; see {log}")
    return version


def _installed(python: Path, package: str) -> str | None:
    if not python.is_file():
        return None
    asked = subprocess.run(
        [python, "-c", _VERSION, package],
        capture_output=True,
        text=True,
        timeout=_ASKING_S,
        check=False,
    )
    return asked.stdout.strip() or None


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if line.upper().startswith("ERROR")]
    return (errors or [line for line in lines if line] or ["pip said nothing"])[-1][:300]
