"""Profiles: which forwards are recorded, and what the control thread did in their rounds.

It counts forwards as they are dispatched, so every member of a replica records the same
ones. What a recording holds, and how it is written, is the data plane's business.
"""

import logging
from collections import deque
from pathlib import PurePath
from typing import Any, Protocol

from msgspec import Struct

from drumline.contract.plan import Batch
from drumline.contract.ports import Clock
from drumline.contract.profile import ProfileAsked, Recording, Span, Stage, stage_of

_UNBOUNDED_STEPS = 20
"""Forwards after which a profile ends that was given no number: nobody may come to end it."""
_SPANS = 100_000
"""Spans of rounds that are kept, the last of them."""

_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """The data plane, as far as it records."""

    def open_profile(self, recording: Recording) -> str | None:
        """Make sure that this can be recorded and written; returns why it cannot."""

    def start_profile(self, stage: Stage | None) -> None:
        """Record what is queued from now on, to the file of a stage where there are several."""

    def stop_profile(self, spans: tuple[Span, ...]) -> str | None:
        """Record no more once all that is queued has run, and write the file."""


class Place(Struct, frozen=True):
    """Where profiles are written, and what this rank is called in them."""

    directory: str = ""
    rank: str = "TP0"


class RoundTrace:
    """What the control thread did in its rounds, while that is recorded."""

    __slots__ = ("_clock", "_since_us", "_spans", "on")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans: deque[Span] = deque(maxlen=_SPANS)
        self._since_us = 0
        self.on = False

    def begin(self, now_us: int) -> None:
        """Note when a round begins."""
        self._since_us = now_us

    def did(self, what: str, facts: dict[str, Any] | None = None) -> None:
        """Note what was done since the round began, or since this was last told."""
        if self.on:
            now_us = self._clock.now_us()
            self._spans.append(Span(what, self._since_us, now_us, facts or {}))
            self._since_us = now_us

    def start(self) -> None:
        """Take notes from now on."""
        self.on = True

    def take(self) -> tuple[Span, ...]:
        """Return what was noted, and end."""
        self.on = False
        spans = tuple(self._spans)
        self._spans.clear()
        return spans


class _Profile:
    """One that an operator asked for, from its start until somebody is told of its end."""

    __slots__ = ("asked", "begins", "counts", "ended", "faults", "name", "stage", "writing")

    def __init__(self, asked: ProfileAsked, name: str, begins: int) -> None:
        self.asked = asked
        self.name = name
        self.begins = begins
        """The number of the first forward."""
        self.counts: dict[Stage | None, int] = {}
        """Forwards by the stages that were begun."""
        self.stage: Stage | None = None
        """The one that is being written, where there are several."""
        self.writing = False
        self.ended = False
        self.faults: list[str] = []

    @property
    def steps(self) -> int:
        return self.asked.num_steps or _UNBOUNDED_STEPS


class Profiles:
    """The profile of this rank, if there is one. Thread: control thread."""

    def __init__(self, recorder: Recorder, place: Place, clock: Clock) -> None:
        self.trace = RoundTrace(clock)
        self._recorder = recorder
        self._place = place
        self._profile: _Profile | None = None
        self._opened: _Profile | None = None
        self._forwards = 0

    @property
    def running(self) -> bool:
        """Whether a profile is in progress."""
        return self._profile is not None and not self._profile.ended

    def open(self, asked: ProfileAsked, now_us: int) -> str | None:
        """Make sure that a profile can begin, and begin none; returns why it cannot."""
        if self.running:
            return "a profile is already in progress; call stop_profile first"
        begins = max(asked.start_step or 0, self._forwards + 1)
        profile = _Profile(asked, asked.profile_id or f"profile-{now_us}", begins)
        fault = self._recorder.open_profile(
            Recording(
                root=self._place.directory,
                directory=asked.output_dir or "",
                name=f"{profile.name}-{self._place.rank}",
                rank=self._place.rank,
                activities=asked.activities,
                stack=asked.with_stack is not False,
                shapes=bool(asked.record_shapes),
            )
        )
        if fault is None:
            self._opened = profile
        else:
            # The replica's first member answers, which may be another one.
            _log.warning("no profile begins: %s", fault)
        return fault

    def settle(self, agreed: bool) -> str:
        """Begin what was opened, if all ranks could; returns what was begun."""
        profile, self._opened = self._opened, None
        if not agreed or profile is None:
            return ""
        self._profile = profile
        self.trace.start()
        each = " of each stage" if profile.asked.profile_by_stage else ""
        return (
            f"profile {profile.name}: from forward {profile.begins} on, "
            f"{profile.steps} forwards{each} or until stop_profile"
        )

    def stop(self) -> tuple[str | None, str]:
        """End the profile; returns why there is none or what went wrong, and what was recorded."""
        profile, self._profile = self._profile, None
        if profile is None:
            return "no profile is in progress; call start_profile first", ""
        self._end(profile)
        if profile.faults:
            return "; ".join(profile.faults), ""
        if not profile.counts:
            return None, f"profile {profile.name}: nothing ran, so there is no file"
        counted = ", ".join(
            f"{count} forwards" + (f" of {stage}" if stage else "")
            for stage, count in profile.counts.items()
        )
        files = PurePath(
            self._place.directory, profile.asked.output_dir or "", f"{profile.name}-*.trace.json.gz"
        )
        return None, f"profile {profile.name}: {counted}, in {files} of each rank"

    def before_forward(self, batch: Batch) -> None:
        """Begin or end a recording, as a forward is about to be dispatched."""
        self._forwards += 1
        profile = self._profile
        if profile is None or profile.ended or self._forwards < profile.begins:
            return
        stage = stage_of(batch) if profile.asked.profile_by_stage else None
        if stage not in profile.counts:
            # The first forward of this kind ends the other kind's file, however short.
            self._write(profile)
            profile.counts[stage] = 0
            profile.stage, profile.writing = stage, True
            self._recorder.start_profile(stage)
            self.trace.start()
        if profile.writing and stage == profile.stage:
            profile.counts[stage] += 1

    def after_dispatch(self) -> None:
        """End a recording that has as many forwards as were asked for."""
        profile = self._profile
        if profile is None or profile.ended or not profile.writing:
            return
        if profile.counts[profile.stage] >= profile.steps:
            self._write(profile)
            kinds = len(Stage) if profile.asked.profile_by_stage else 1
            if len(profile.counts) == kinds:
                self._end(profile)

    def _write(self, profile: _Profile) -> None:
        if not profile.writing:
            return
        profile.writing = False
        fault = self._recorder.stop_profile(self.trace.take())
        if fault is not None:
            profile.faults.append(fault)
            _log.warning("profile %s: %s", profile.name, fault)

    def _end(self, profile: _Profile) -> None:
        self._write(profile)
        # One that recorded nothing wrote nothing, and its notes would go on for ever.
        self.trace.take()
        profile.ended = True
