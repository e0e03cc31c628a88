"""What a round may hold, and who goes first."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from drumline.core.config.fields import NotNegative, Positive, Rows, flags


class SchedulingPolicy(StrEnum):
    """In which order waiting requests are admitted."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class Role(StrEnum):
    """Which part of a request's way an engine takes."""

    PLAIN = "plain"
    """All of it."""
    PREFILL = "prefill"
    """Prompts, whose cache a decode engine takes over."""
    DECODE = "decode"
    """Answers, to prompts whose cache a prefill engine sends."""


class ScheduleConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a round may hold."""

    max_num_seqs: Annotated[
        Rows,
        Meta(
            description="requests that run at the same time",
            extra=flags("--max-running-requests"),
        ),
    ] = 160
    chunked_prefill_size: Annotated[
        Positive,
        Meta(
            description="tokens a round may compute; longer prompts are cut into chunks",
            extra=flags("--max-num-batched-tokens"),
        ),
    ] = 2048
    overlap_schedule: Annotated[
        bool,
        Meta(
            description="plan a round while the forward before it still runs",
            extra={
                "off": ["--disable-overlap-schedule", "--no-async-scheduling"],
            },
        ),
    ] = True
    mixed_batch: Annotated[
        bool,
        Meta(
            description="let prefill and decode rows share a batch",
            extra={
                "flags": ["--enable-mixed-batch", "--enable-mixed-chunk"],
                "off": ["--disable-mixed-batch"],
            },
        ),
    ] = True
    mixed_prefill_tokens: Annotated[
        Positive | None,
        Meta(
            description="prompt tokens that a batch may compute beside decodes, so that long "
            "prompts slow answers by a bounded time only; at most what --chunked-prefill-size "
            "leaves",
        ),
    ] = 256
    scheduling_policy: Annotated[
        SchedulingPolicy,
        Meta(
            description="order in which waiting requests are admitted: as they came, or those of "
            "higher priority first",
            extra=flags("--schedule-policy"),
        ),
    ] = SchedulingPolicy.FCFS
    scheduling_patience: Annotated[
        NotNegative,
        Meta(
            description="plans that may admit later requests before a waiting one; then it goes "
            "first, and nobody before it; 0 is any number",
        ),
    ] = 0
    max_num_queued_reqs: Annotated[
        Positive | None,
        Meta(
            description="requests a rank lets wait beyond those it has free rows for; more are "
            "answered 429; any number by default",
            extra=flags("--max-queued-requests"),
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        Positive | None,
        Meta(
            description="prompt tokens a rank lets wait, a single request's always; more are "
            "answered 429; any number by default",
        ),
    ] = None
