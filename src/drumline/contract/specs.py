"""What the device builder found and resolved: plain values, kept for ever."""

from enum import StrEnum

from msgspec import Struct


class AttentionKind(StrEnum):
    """How a cache group is read."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    STATE = "state"


class CacheGroup(Struct, frozen=True, kw_only=True):
    """Layers that share a block table.

    A block holds `block_tokens` tokens of the group, or, of a state group, where that is 0,
    what its layers carry on behind a token. `blocks_per_parent` blocks share one parent,
    the unit in which the pool is divided among groups.

    A state group's table has two columns: a forward reads from the block in the first what
    was carried up to its first token and writes into the block in the second what it
    carries on; where the first is null, it reads the second too.
    """

    group_id: str
    kind: AttentionKind = AttentionKind.FULL
    block_tokens: int
    window_tokens: int | None = None
    blocks_per_parent: int = 1


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What the checkpoint says of itself."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """What it is computed in: `float32`, `bfloat16` or `float16`."""


class HistoryNeed(Struct, frozen=True):
    """A model reads tokens of before: no more than `lookback` behind what it is fed, or all.

    That it never reads further is the model's promise, not a setting.
    """

    lookback: int | None = None


class DeviceSpecs(Struct, frozen=True, kw_only=True):
    """The geometry the control plane plans with."""

    model: ModelFacts
    groups: tuple[CacheGroup, ...]
    num_pages: int
    """Parents in the device pool, the null page 0 included."""
    bytes_per_page: int
    prefix_granularity: int
    max_rows: int
    """Requests that may hold a pool row; rows are 1 … max_rows, row 0 is never given."""
    max_scheduled_tokens: int
    """Tokens one forward may feed."""
    backend: str
    """Which kernels run, for the log and `/server_info`."""
    device: str = "cpu"
    """What they run on, likewise: `cpu`, or CUDA and the GPU's name."""
    kv_dtype: str = "float32"
    """What keys and values are kept as: `float32`, `bfloat16`, `float16` or `int8`."""
    num_host_pages: int = 1
    """Parents in the host pool, the null page 0 included; 1 is no pool."""
    num_snapshot_pages: int = 1
    """Parents in the pool of suspended requests' images, the null page included; 1 is no pool."""
    max_retracted_requests: int = 0
    """Requests that may be suspended at the same time."""
    history: HistoryNeed | None = None
    """Which tokens of before the model reads; None for one that reads its inputs alone."""
    discards_weights: bool = False
    """Whether weights that serve are given up before others are loaded."""

    @property
    def kv_tokens(self) -> int:
        """Tokens the pool holds if one group fills it."""
        group = self.groups[0]  # state groups come last
        return (self.num_pages - 1) * group.blocks_per_parent * group.block_tokens
