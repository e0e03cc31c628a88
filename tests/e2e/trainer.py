"""A trainer in a process of its own: rank 0 of a group made by torch's own helper for that.

    python trainer.py PORT WORLD CHECKPOINT [MOST]

It says `here`, meets the others and says `met`, waits for a line on standard input, sends the
checkpoint's tensors in their order (the first MOST, and then it dies), and says `sent`.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import safetensors.torch
from torch import distributed
from torch.distributed import distributed_c10d

GROUP = "weight_update_group"
TIMEOUT = timedelta(seconds=30)


def main() -> None:
    """Be the trainer."""
    port, world, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    most = int(sys.argv[4]) if len(sys.argv) > 4 else None
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    print("here", flush=True)  # noqa: T201
    place = f"tcp://127.0.0.1:{port}"
    store, rank, size = next(distributed.rendezvous(place, 0, world, timeout=TIMEOUT))
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        "gloo",
        distributed.PrefixStore(GROUP, store),
        group_name=GROUP,
        timeout=TIMEOUT,
    )
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    print("met", flush=True)  # noqa: T201
    sys.stdin.readline()
    for tensor in list(tensors.values())[:most]:
        distributed.broadcast(tensor, src=0, group=group)
    if most is not None:
        os._exit(1)
    print("sent", flush=True)  # noqa: T201
    sys.stdin.readline()


main()
