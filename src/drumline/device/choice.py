"""Which device a rank computes on, and what that device is.

It settles `--device` against what torch sees. It allocates nothing.
"""

import torch
from msgspec import Struct

from drumline.core.errors import ConfigError

_FLAG = "--device"


class Room(Struct, frozen=True):
    """A device's memory, in bytes: all of it, and what this process may still take."""

    total: int
    available: int


def device_of(asked: str, local_rank: int = 0, local_ranks: int = 1) -> torch.device:
    """Return the device of one of a machine's ranks, each of which has a GPU of its own.

    `asked` is `auto`, `cpu`, `cuda`, or `cuda:N` for the first rank's. Raises ConfigError where
    there are not as many GPUs as ranks, or this torch sees none.
    """
    kind, _, number = asked.partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f", which is built for CUDA {torch.version.cuda}," if torch.version.cuda else ""
        raise ConfigError(
            _FLAG, f"{asked} is asked for, and torch {torch.__version__}{built} sees no GPU"
        )
    first, count = int(number or 0), torch.cuda.device_count()
    if first + local_ranks > count:
        behind = f" from {first} on" if first else ""
        raise ConfigError(
            _FLAG,
            f"{local_ranks} ranks of this machine take a GPU each{behind}, and there are {count}; "
            "start fewer ranks on it (--tensor-parallel-size, --pipeline-parallel-size, "
            "--data-parallel-size, --nprocs-per-node), or say --device cpu",
        )
    return torch.device("cuda", first + local_rank)


def use(device: torch.device) -> None:
    """Have the calling thread reach this device and no other."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def name_of(device: torch.device) -> str:
    """Return what a device is, the same for every one of its kind: `cpu`, `cuda (NVIDIA H200)`."""
    if device.type != "cuda":
        return device.type
    return f"{device.type} ({torch.cuda.get_device_name(device)})"


def room_of(device: torch.device) -> Room:
    """Return the memory of a CUDA device."""
    available, total = torch.cuda.mem_get_info(device)
    return Room(total, available)
