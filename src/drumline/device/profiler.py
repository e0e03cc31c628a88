"""Recording what the forward thread computes, and writing it beside the rounds it was for.

A file is what Chrome and Perfetto read: torch's trace of this process, with what the control
thread did on the same clock. Annotations say what a batch is, from the plan's own numbers: no
tensor is read for them, and nothing waits.

Thread: forward thread only.
"""

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

_encode = msgspec.json.Encoder().encode
_decode_trace = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_events = msgspec.json.Decoder(list[Raw]).decode


class Profiler:
    """Torch's profiler, for one recording after the other."""

    __slots__ = ("_clock", "_device", "_marked_us", "_path", "_recording", "_running", "_target")

    def __init__(self, device: torch.device, clock: SystemClock) -> None:
        self._device = device
        self._clock = clock
        self._recording: Recording | None = None
        self._target = Path()
        self._running: Any = None
        self._path = Path()
        self._marked_us = 0

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
        target = (root / recording.directory).resolve()
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
        wanted = recording.activities or tuple(a for a in self.activities if a is not Activity.MEM)
        self._path = _file(self._target, recording, stage)
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
        self._marked_us = self._clock.now_us()
        with torch.autograd.profiler.record_function(f"{_CLOCK}{self._marked_us}"):
            pass

    def forward(self, plan: Plan) -> AbstractContextManager[object]:
        """Return the context in which a plan's forward runs."""
        batch = plan.batch
        if self._running is None or batch is None:
            return _NOTHING
        name = (
            f"{FORWARD} {plan.round}: {stage_of(batch)}, {batch.size} rows, {batch.tokens} tokens, "
            f"{batch.extends} with prompts"
        )
        annotation: AbstractContextManager[object] = torch.autograd.profiler.record_function(name)
        return annotation

    def stop(self, spans: tuple[Span, ...]) -> str | None:
        """Record no more, and write the file; returns why it cannot be written."""
        running, self._running = self._running, None
        if running is None:
            return None
        try:
            running.__exit__(None, None, None)
            with tempfile.TemporaryDirectory() as directory:
                raw = Path(directory, "trace.json")
                running.export_chrome_trace(str(raw))
                trace = _decode_trace(raw.read_bytes())
            trace["traceName"] = Raw(_encode(self._path.name))
            trace["traceEvents"] = self._joined(trace["traceEvents"], spans)
            with gzip.open(self._path, "xb", compresslevel=_LEVEL) as file:
                file.write(_encode(trace))
        except (OSError, RuntimeError) as error:
            return f"{self._path} was not written: {error}"
        _log.info("wrote %s", self._path)
        return None

    def _joined(self, events: Raw, spans: tuple[Span, ...]) -> Raw:
        """Return a trace's events with those of the control thread."""
        ours = _encode(self._events(spans, self._ahead_us(events)))
        return Raw(bytes(events).rstrip()[:-1] + b"," + ours[1:])

    def _ahead_us(self, events: Raw) -> float:
        """Return what the trace's clock is ahead of the machine's monotonic one."""
        mark = f'"{_CLOCK}{self._marked_us}"'.encode()
        marked = next(each for each in _decode_events(events) if mark in memoryview(each).tobytes())
        return float(msgspec.json.decode(marked)["ts"]) - self._marked_us

    def _events(self, spans: tuple[Span, ...], ahead_us: float) -> list[dict[str, Any]]:
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
                "ts": span.begin_us + ahead_us,
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
