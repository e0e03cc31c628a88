"""What a Slurm step says of the machines it runs on.

`srun --ntasks-per-node=1 drumline serve …` starts the command once on each machine; how many
there are, which one this is, and which is the first, each task reads from its environment.
It asks Slurm nothing.
"""

import re
from collections.abc import Mapping

from msgspec.structs import replace

from drumline.core.config import ParallelConfig
from drumline.core.errors import ConfigError

MEETING_PORT = 23456

_NODE_LIST = "SLURM_STEP_NODELIST"
_RANGES = re.compile(r"\[([^],-]+)[^]]*\]")
_FIRST = re.compile(r"((?:[^],\[]|\[[^]]*\])+)(?:,|$)")


def placed(parallel: ParallelConfig, environment: Mapping[str, str]) -> ParallelConfig:
    """Return `parallel` with what a step of several machines says and the operator did not.

    Raises ConfigError where the two contradict each other, or the step has more tasks than
    machines.
    """
    nodes = _number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    if _NODE_LIST not in environment or nodes is None or nodes == 1:
        return parallel
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks not in {None, nodes}:
        raise ConfigError(
            "SLURM_STEP_NUM_TASKS",
            f"{tasks} tasks on {nodes} machines; one starts all ranks of a machine: "
            "srun --ntasks-per-node=1",
        )
    node = _number(environment, "SLURM_NODEID")
    for flag, said, slurms in (
        ("--nnodes", parallel.nnodes, nodes),
        ("--node-rank", parallel.node_rank, node),
    ):
        if said not in {None, slurms}:
            raise ConfigError(flag, f"{said}, but the Slurm step says {slurms}; leave the flag out")
    head = first_host(environment[_NODE_LIST])
    return replace(
        parallel,
        nnodes=nodes,
        node_rank=node,
        dist_init_addr=parallel.dist_init_addr or f"{head}:{MEETING_PORT}",
    )


def first_host(node_list: str) -> str:
    """Return the first host of Slurm's list, such as `node07` of `node[07-12,20],login1`."""
    found = _FIRST.match(node_list)
    host = _RANGES.sub(r"\1", found[1]) if found else ""
    if not host or set(host) & set("[],"):
        raise ConfigError(_NODE_LIST, f"{node_list!r} is no list of hosts")
    return host


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    """Return the number under the first of `names` that is set."""
    for name in names:
        text = environment.get(name)
        if text is not None:
            if not text.isdecimal():
                raise ConfigError(name, f"{text!r} is no number")
            return int(text)
    return None
