"""Which forwards are recorded on CUDA, and repeated as one thing."""

from typing import Annotated

from msgspec import Meta, Struct

from drumline.core.config.fields import Rows, flags
from drumline.core.errors import ConfigError

DEFAULT_MOST_GRAPH_ROWS = 512


class GraphConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which forwards are recorded on CUDA."""

    cuda_graph: Annotated[
        bool,
        Meta(
            description="on CUDA, record the forward of answers' tokens as graphs at the start, so "
            "that it is launched as one thing; elsewhere there is nothing to record",
            extra={
                "flags": ["--no-enforce-eager"],
                "off": ["--disable-cuda-graph", "--enforce-eager"],
            },
        ),
    ] = True
    cuda_graph_bs: Annotated[
        tuple[Rows, ...],
        Meta(
            description="batch sizes that are recorded: 1, 2, 4, 8 and then in steps, up to "
            "--cuda-graph-max-bs, by default; a batch runs as the next larger one, and beyond the "
            "largest unrecorded",
            extra=flags("--cudagraph-capture-sizes", "--cuda-graph-sizes"),
        ),
    ] = ()
    cuda_graph_max_bs: Annotated[
        Rows | None,
        Meta(
            description="largest batch size that is recorded; --max-num-seqs by default, at most "
            f"{DEFAULT_MOST_GRAPH_ROWS}",
            extra=flags("--max-cudagraph-capture-size"),
        ),
    ] = None

    def __post_init__(self) -> None:
        for flag, value in (
            ("--cuda-graph-bs", self.cuda_graph_bs),
            ("--cuda-graph-max-bs", self.cuda_graph_max_bs),
        ):
            if value and not self.cuda_graph:
                raise ConfigError(flag, "has no effect beside --disable-cuda-graph")
        if self.cuda_graph_bs and self.cuda_graph_max_bs:
            raise ConfigError("--cuda-graph-max-bs", "has no effect beside --cuda-graph-bs")
