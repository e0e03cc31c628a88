"""What of the ranks' work is recorded: what an operator asks for, and what a rank is told."""

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct

from drumline.contract.plan import Batch

MOST_STEPS = 1_000
_LAST_STEP = 1 << 40


class Activity(StrEnum):
    """What is recorded, under the names that operators of other engines know."""

    CPU = "CPU"
    """What the forward thread computes."""
    GPU = "GPU"
    """What the device does for it."""
    MEM = "MEM"
    """What tensors take and give back, among what is computed."""


class Stage(StrEnum):
    """Forwards by what they are for, where each has a file of its own."""

    EXTEND = "EXTEND"
    """Some of their tokens are of prompts."""
    DECODE = "DECODE"
    """None of them is."""


def stage_of(batch: Batch) -> Stage:
    """Return what a forward is for."""
    return Stage.EXTEND if batch.extends else Stage.DECODE


class ProfileAsked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator asks for, of all ranks alike."""

    output_dir: Annotated[str, Meta(min_length=1)] | None = None
    """Where the files go, inside the directory for profiles; that one by default."""
    start_step: Annotated[int, Meta(ge=0, le=_LAST_STEP)] | None = None
    """The forward of the engine at which to begin, not before the next one."""
    num_steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)] | None = None
    """Forwards after which it ends by itself, of each stage where those are apart."""
    activities: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    """All that a rank can record but MEM by default."""
    profile_by_stage: bool = False
    with_stack: bool | None = None
    """Whether Python's calls are recorded, which they are by default."""
    record_shapes: bool | None = None
    profile_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")] | None = None
    """What the files' names begin with."""


class Recording(Struct, frozen=True, kw_only=True):
    """What one rank records, and where it writes it."""

    root: str
    """The directory that an operator set aside; empty is the one for temporary files."""
    directory: str
    """Where inside of it the files go."""
    name: str
    """The files' names but for stage and ending."""
    rank: str
    """What the rank is called in them."""
    activities: tuple[str, ...] | None
    stack: bool
    shapes: bool


class Span(Struct, frozen=True):
    """What the control thread did, and when by the machine's monotonic clock."""

    name: str
    begin_us: int
    end_us: int
    facts: dict[str, Any] = {}


FORWARD = "forward"
"""What the annotation of a forward begins with; the round that planned it follows."""
