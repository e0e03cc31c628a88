"""How the engine's processes start, stop and speak."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from drumline.core.config.fields import Seconds, flags


class LogLevel(StrEnum):
    """How much a process says."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class DeviceChecks(StrEnum):
    """What becomes of a forward thread that waits for its device, or compiles, while it serves."""

    WARN = "warn"
    ERROR = "error"


class ProcessConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine's processes start, stop and speak."""

    drain_timeout: Annotated[
        Seconds,
        Meta(
            description="seconds that running requests get to finish on shutdown",
            extra=flags("--shutdown-timeout"),
        ),
    ] = 30.0
    startup_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=1e9,
            description="seconds until an engine that is not ready counts as failed",
            extra=flags("--engine-startup-timeout"),
        ),
    ] = 3600.0
    log_level: Annotated[
        LogLevel | None,
        Meta(description="how much is logged; info for a server, else warning"),
    ] = None
    device_checks: Annotated[
        DeviceChecks,
        Meta(
            description="what follows where forwards are held up by a compiler or by waiting for "
            "the device: a warning in the log, or error, the rank's end",
        ),
    ] = DeviceChecks.WARN
    profile_dir: Annotated[
        str | None,
        Meta(
            description="directory inside of which profiles are written; that for temporary files "
            "by default",
            extra=flags("--profiler-dir"),
        ),
    ] = None
