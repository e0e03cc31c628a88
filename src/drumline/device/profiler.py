"""Recording what the forward thread computes, and writing it beside the rounds it was for.

A file is what Chrome and Perfetto read: torch's trace of this process, with what the control
thread did on the same clock. Annotations say what a batch is, from the plan's own numbers: no
tensor is read for them, and nothing waits.

Thread: forward thread only.
"""

import contextlib
import gzip
import logging
import os
import tempfile
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Raw

from drumline.contract.plan import Plan
from drumline.contract.profile import FORWARD, Activity, Recording, Span, Stage, stage_of
from drumline.core.clock import SystemClock

_CLOCK = "drumline clock "
"""An annotation that says what the monotonic clock showed when it was made."""
_log = logging.getLogger(__name__)

_NOTHING: AbstractContextManager[object] = nullcontext()
_LEVEL = 3
"""Of compression: most of what there is to gain, in little time."""
_PIECE = 8
"""Forwards after which torch is asked for what it holds, some tens of megabytes on a CPU."""

_encode = msgspec.json.Encoder().encode
_decode_trace = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_events = msgspec.json.Decoder(list[Raw]).decode


class _TraceFile:
    """A trace that is written piece by piece: what is recorded may be larger than memory."""

    def __init__(self, path: Path, head: dict[str, Raw]) -> None:
        """Begin a new file. Raises OSError where there is one."""
        self.path = path
        # Open for as long as the recording lasts.
        self._file = gzip.open(path, "xb", compresslevel=_LEVEL)  # noqa: SIM115
        facts = {**head, "traceName": path.name}
        del facts["traceEvents"]
        self._file.write(_encode(facts)[:-1] + b',"traceEvents":[')
        self._comma = b""

    def add(self, events: bytes) -> None:
        """Add what a JSON array holds."""
        inside = events.strip()[1:-1]
        if inside.strip():
            self._file.write(self._comma + inside)
            self._comma = b","

    def close(self) -> None:
        """End the file."""
        self._file.write(b"]}")
        self._file.close()

    def drop(self) -> None:
        """Take the file back, as it will not be whole."""
        with contextlib.suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)


class Profiler:
    """Torch's profiler, for one recording after the other.

    Torch gives out what it holds in one go, in which no other thread of the process runs, so
    it is asked every few forwards: peers that hear nothing meanwhile do not give this rank up.
    """

    __slots__ = (
        "_ahead_us", "_clock", "_device", "_fault", "_file", "_forwards", "_marked_us", "_path",
        "_recording", "_running", "_target",
    )  # fmt: skip

    def __init__(self, device: torch.device, clock: SystemClock) -> None:
        self._device = device
        self._clock = clock
        self._recording: Recording | None = None
        self._target = Path()
        self._running: Any = None
        self._forwards = 0
        self._path = Path()
        self._file: _TraceFile | None = None
        self._fault: str | None = None
        self._marked_us = 0
        self._ahead_us = 0.0

    @property
    def activities(self) -> tuple[Activity, ...]:
        """What can be recorded here."""
        gpu = (Activity.GPU,) if self._device.type == "cuda" else ()
        return (Activity.CPU, *gpu, Activity.MEM)

    def open(self, recording: Recording) -> str | None:
        """Make sure that this can be recorded and written; returns why it cannot."""
        known = self.activities
        for asked in recording.activities or ():
            if asked not in known:
                return f"activity {asked!r} cannot be recorded here; {', '.join(known)} can"
        root = Path(recording.root or tempfile.gettempdir()).resolve()
        try:
            target = (root / recording.directory).resolve()
        except (ValueError, RuntimeError) as error:  # a null character, or links in a circle
            return f"output_dir {recording.directory!r} is no path: {error}"
        if not target.is_relative_to(root):
            return (
                f"output_dir {recording.directory!r} is outside of {root}, where profiles are "
                "written; --profile-dir names another directory"
            )
        try:
            target.mkdir(parents=True, exist_ok=True)
            taken = [each for each in self._files(target, recording) if each.exists()]
            # Writing is tried, as whoever is root may always by the look of it.
            with tempfile.TemporaryFile(dir=target):
                pass
        except OSError as error:
            return f"cannot write into {target}: {error.strerror}"
        if taken:
            return f"{taken[0]} exists; give another profile_id"
        self._recording, self._target = recording, target
        return None

    def start(self, stage: Stage | None) -> None:
        """Record from now on."""
        recording = self._recording
        assert recording is not None, "a profile is started that was not opened"
        self._path = _file(self._target, recording, stage)
        self._fault = None
        self._begin(recording)

    def forward(self, plan: Plan) -> AbstractContextManager[object]:
        """Return the context in which a plan's forward runs."""
        batch, recording = plan.batch, self._recording
        if self._running is not None and recording is not None and self._forwards == _PIECE:
            self._end()
            if self._fault is None:
                self._begin(recording)
        if self._running is None or batch is None:
            return _NOTHING
        self._forwards += 1
        name = (
            f"{FORWARD} {plan.round}: {stage_of(batch)}, {batch.size} rows, {batch.tokens} tokens, "
            f"{batch.extends} with prompts"
        )
        annotation: AbstractContextManager[object] = torch.autograd.profiler.record_function(name)
        return annotation

    def stop(self, spans: tuple[Span, ...]) -> str | None:
        """Record no more, and end the file; returns why it could not be written."""
        if self._running is not None:
            self._end()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.add(_encode(self._events(spans)))
                file.close()
            except OSError as error:
                file.drop()
                self._fault = f"{file.path} was not written: {error}"
        if self._fault is None:
            _log.info("wrote %s", self._path)
        return self._fault

    def _begin(self, recording: Recording) -> None:
        """Have torch record the next few forwards."""
        wanted = recording.activities or tuple(a for a in self.activities if a is not Activity.MEM)
        # Not `torch.profiler`, which loads a compiler of seconds first.
        self._running = torch.autograd.profiler.profile(
            use_cpu=Activity.CPU in wanted or Activity.MEM in wanted,
            use_device="cuda" if Activity.GPU in wanted else None,
            use_kineto=True,
            record_shapes=recording.shapes,
            with_stack=recording.stack,
            profile_memory=Activity.MEM in wanted,
        )
        self._running.__enter__()
        self._forwards = 0
        self._marked_us = self._clock.now_us()
        with torch.autograd.profiler.record_function(f"{_CLOCK}{self._marked_us}"):
            pass

    def _end(self) -> None:
        """Write what torch recorded; what fails is told at the stop, and ends the recording."""
        running, self._running = self._running, None
        try:
            running.__exit__(None, None, None)
            with tempfile.TemporaryDirectory() as directory:
                raw = Path(directory, "trace.json")
                running.export_chrome_trace(str(raw))
                trace = _decode_trace(raw.read_bytes())
            events = trace["traceEvents"]
            self._ahead_us = self._ahead(events)
            if self._file is None:
                self._file = _TraceFile(self._path, trace)
            self._file.add(bytes(events))
        except (OSError, RuntimeError, msgspec.DecodeError) as error:
            self._fault = f"{self._path} was not written: {error}"
            if self._file is not None:
                self._file.drop()
                self._file = None

    def _ahead(self, events: Raw) -> float:
        """Return what the trace's clock is ahead of the machine's monotonic one.

        Raises RuntimeError where nothing of the CPU's was recorded, which would say.
        """
        mark = f'"{_CLOCK}{self._marked_us}"'.encode()
        marked = next((each for each in _decode_events(events) if mark in bytes(each)), None)
        if marked is None:
            raise RuntimeError("the trace does not say what its clock shows")
        return float(msgspec.json.decode(marked)["ts"]) - self._marked_us

    def _events(self, spans: tuple[Span, ...]) -> list[dict[str, Any]]:
        """Return the control thread's events, and what threads and process are called."""
        process, thread = os.getpid(), threading.get_native_id()
        # The control thread is the process's main one, which has the number of the process.
        names = [
            (
                "process_name",
                process,
                f"drumline {self._recording.rank if self._recording else ''}",
            ),
            ("thread_name", process, "control"),
            ("thread_name", thread, "forward"),
        ]
        metadata: list[dict[str, Any]] = [
            {"ph": "M", "name": what, "pid": process, "tid": tid, "args": {"name": name}}
            for what, tid, name in names
        ]
        return metadata + [
            {
                "ph": "X",
                "cat": "round",
                "name": span.name,
                "pid": process,
                "tid": process,
                "ts": span.begin_us + self._ahead_us,
                "dur": span.end_us - span.begin_us,
                "args": span.facts,
            }
            for span in spans
        ]

    @staticmethod
    def _files(target: Path, recording: Recording) -> list[Path]:
        return [_file(target, recording, stage) for stage in (None, *Stage)]


def _file(target: Path, recording: Recording, stage: Stage | None) -> Path:
    suffix = f"-{stage}" if stage else ""
    return target / f"{recording.name}{suffix}.trace.json.gz"
