"""How many ranks there are, where they run, and how they share the work."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from drumline.core.config.fields import NotNegative, Positive, Seconds, flags


class LoadBalance(StrEnum):
    """How requests are spread over data-parallel ranks."""

    ROUND_ROBIN = "round_robin"
    SHORTEST_QUEUE = "shortest_queue"
    MINIMUM_CACHE_USAGE = "minimum_cache_usage"
    PREFIX_AWARE = "prefix_aware"


class DistributedBackend(StrEnum):
    """Who starts the ranks of other machines than the first."""

    MP = "mp"
    """The operator: the same command on each."""
    RAY = "ray"
    """A Ray cluster."""


class ParallelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many ranks serve the model, and how they share the work."""

    tensor_parallel_size: Annotated[
        Positive,
        Meta(
            description="ranks that compute one forward together, each with a part of the weights",
            extra=flags("--tp", "--tp-size", "--attn-tp-size", "-tp"),
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        Positive,
        Meta(
            description="stages that a forward passes one after the other, each with some of the "
            "layers, on --tensor-parallel-size ranks",
            extra=flags("--pp", "--pp-size", "-pp"),
        ),
    ] = 1
    data_parallel_size: Annotated[
        Positive,
        Meta(
            description="copies of the model that take requests in turn, in step with each other",
            extra=flags("--dp", "--dp-size", "-dp"),
        ),
    ] = 1
    load_balance_method: Annotated[
        LoadBalance,
        Meta(description="which data-parallel rank takes a request that names none"),
    ] = LoadBalance.SHORTEST_QUEUE
    nprocs_per_node: Annotated[
        Positive | None,
        Meta(description="ranks on each machine; all of them by default, shared out evenly"),
    ] = None
    nnodes: Annotated[
        Positive | None,
        Meta(
            description="machines that the ranks are spread over, each of which runs this command; "
            "those of the Slurm step by default, else 1"
        ),
    ] = None
    node_rank: Annotated[
        NotNegative | None,
        Meta(
            description="which of the machines this is, from 0; the first one serves, the others "
            "run ranks only"
        ),
    ] = None
    dist_init_addr: Annotated[
        str | None,
        Meta(
            description="host:port of the first machine, where rank 0 meets the others; the same "
            "on every machine; a free port of 127.0.0.1 by default"
        ),
    ] = None
    distributed_backend: Annotated[
        DistributedBackend,
        Meta(
            description="who starts the ranks of other machines: the same command on each (mp), or "
            "a Ray cluster that this machine belongs to",
            extra=flags("--distributed-executor-backend"),
        ),
    ] = DistributedBackend.MP
    dist_secret_file: Annotated[
        str | None,
        Meta(
            description="a file with a secret that ranks of several machines show each other, the "
            "same on every machine"
        ),
    ] = None
    peer_timeout: Annotated[
        Seconds,
        Meta(
            description="seconds of silence after which another rank is given up and the engine "
            "ends; 0 only reports it and waits",
        ),
    ] = 5.0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def nodes(self) -> int:
        """How many machines there are."""
        return self.nnodes or 1

    @property
    def node(self) -> int:
        """Which of them this is."""
        return self.node_rank or 0

    @property
    def local_ranks(self) -> int:
        """How many ranks run on each machine."""
        return self.nprocs_per_node or self.world_size // self.nodes
