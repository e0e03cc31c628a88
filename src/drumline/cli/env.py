"""What a bug report needs to know: versions and the machine."""

import importlib.metadata
import os
import platform

from drumline.core.version import VERSION

_PACKAGES = (
    "torch",
    "numpy",
    "msgspec",
    "pyzmq",
    "tokenizers",
    "gguf",
    "safetensors",
    "starlette",
    "uvicorn",
)


def show_environment() -> None:
    """Print versions and the machine, a line each."""
    print(f"drumline {VERSION}")
    print(f"python {platform.python_version()} on {platform.platform()}")
    print(f"cpus {os.cpu_count()}")
    for package in _PACKAGES:
        try:
            print(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} is not installed")
    for name, value in sorted(os.environ.items()):
        if name.startswith("DRUMLINE_") or name in ("OMP_NUM_THREADS", "HF_HOME"):
            print(f"{name}={'(a secret)' if name.endswith('_API_KEY') else value}")
