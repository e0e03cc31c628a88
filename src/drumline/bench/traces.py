"""Profiles of several ranks as one: every launch with what the device did for it.

A file is one process of one rank, and what stands in it is correlated within it alone:
numbers of processes, devices and launches mean something else in every other. Work of a
device belongs to the forward that launched it, however long after the launch it ran.
"""

import gzip
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from drumline.contract.profile import FORWARD
from drumline.core.errors import ConfigError

ENDING = ".trace.json.gz"
_LEVEL = 3
_LAUNCHES = {"cuda_runtime", "cuda_driver", "xpu_runtime", "hip_runtime"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "concurrent_kernel"}
_SORTED = {*_LAUNCHES, *_DEVICE, "user_annotation", "round"}
_FLOW = "ac2g"
"""What the arrows from launches to the device are called in a single trace; they are drawn anew."""
_FORWARD = re.compile(rf"{FORWARD} (\d+): (\w+)")

Event = dict[str, Any]


_NEEDED = ("name", "ts", "dur", "pid", "tid")


class _Fields(Struct):
    """What an event's fields are, where it has them."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: dict[str, Any] = {}


class _Sound(Struct):
    """A file whose events have fields of the right kinds."""

    events: list[_Fields] = msgspec.field(name="traceEvents")


class _File(Struct):
    """What of a trace's file is read."""

    events: list[Event] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)


_check = msgspec.json.Decoder(_Sound).decode
_decode = msgspec.json.Decoder(_File).decode
_encode = msgspec.json.Encoder().encode


class RankSummary(Struct, frozen=True, kw_only=True):
    """What one file says of its rank, times in microseconds."""

    rank: str
    forwards: int
    host_us: float
    """In forwards, on the forward thread."""
    launches: int
    """Of device work, in forwards or not."""
    device_us: float
    """What the device did for launches in forwards, whenever it did."""
    device_alone_us: float
    """What it did for launches outside of forwards."""
    unmatched_launches: int
    """Launches of which no device work is known: mostly of what is none, such as waits."""
    unmatched_device: int
    """Device work of whose launch nothing is known."""


class _Forward(Struct):
    thread: Any
    begin: float
    end: float
    device_us: float = 0.0


class _Trace:
    """One file's events, correlated among themselves."""

    def __init__(self, path: Path) -> None:
        self.name = _rank_of(path)
        file = _read(path)
        self.base_ns = file.base_ns
        self.events = [event for event in file.events if event.get("cat") != _FLOW]
        self.launches: dict[Any, Event] = {}
        self.device: list[Event] = []
        self.forwards: dict[int, Event] = {}
        self.dispatches: dict[int, Event] = {}
        for event in self.events:
            try:
                self._sort(event)
            except KeyError as error:
                what = f"an event of {event.get('cat')!r} has no {error.args[0]!r}"
                raise ConfigError(str(path), f"is no trace: {what}") from None

    def _sort(self, event: Event) -> None:
        kind = event.get("cat")
        if kind not in _SORTED:
            return
        for field in _NEEDED:
            event[field]
        if kind in _LAUNCHES and (number := _correlation(event)) is not None:
            self.launches[number] = event
        elif kind in _DEVICE:
            self.device.append(event)
        elif kind == "user_annotation" and (found := _FORWARD.match(event["name"])):
            self.forwards[int(found[1])] = event
        elif event["name"] == "dispatch" and "rows" in event["args"]:
            self.dispatches[event["args"]["round"]] = event

    def pairs(self) -> Iterator[tuple[Event, Event]]:
        """Return every launch with each piece of device work that it began."""
        for work in self.device:
            launch = self.launches.get(_correlation(work))
            if launch is not None:
                yield launch, work

    def arrows(self) -> Iterator[tuple[Event, Event]]:
        """Return what led to what: dispatches to forwards, launches to device work."""
        for round_, dispatch in self.dispatches.items():
            if round_ in self.forwards:
                yield dispatch, self.forwards[round_]
        yield from self.pairs()

    def summary(self) -> RankSummary:
        """Return what the ranks are compared by."""
        spans = sorted(
            (
                _Forward(event["tid"], event["ts"], event["ts"] + event["dur"])
                for event in self.forwards.values()
            ),
            key=lambda span: span.begin,
        )
        begins = [span.begin for span in spans]
        alone, seen = 0.0, set()
        for launch, work in self.pairs():
            seen.add(_correlation(launch))
            at = bisect_right(begins, launch["ts"]) - 1
            span = spans[at] if at >= 0 else None
            if span is None or launch["tid"] != span.thread or launch["ts"] > span.end:
                alone += work["dur"]
            else:
                span.device_us += work["dur"]
        return RankSummary(
            rank=self.name,
            forwards=len(spans),
            host_us=sum(span.end - span.begin for span in spans),
            launches=len(self.launches),
            device_us=sum(span.device_us for span in spans),
            device_alone_us=alone,
            unmatched_launches=len(self.launches) - len(seen),
            unmatched_device=sum(_correlation(work) not in self.launches for work in self.device),
        )


def merge(paths: Sequence[Path], output: Path) -> list[RankSummary]:
    """Write the traces of several ranks to one file; returns what each of them says.

    Raises ConfigError for a file that is no trace, for two of one rank, and for an output that
    exists or cannot be written.
    """
    traces = [_Trace(path) for path in paths]
    names = [trace.name for trace in traces]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(str(output), f"two files are of rank {twice[0]}; merge one profile only")
    base_ns = min(trace.base_ns for trace in traces)
    joined = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "traceEvents": list(_merged(traces, base_ns)),
    }
    try:
        with gzip.open(output, "xb", compresslevel=_LEVEL) as file:
            file.write(_encode(joined))
    except FileExistsError:
        raise ConfigError(str(output), "exists; name another file with --output") from None
    except OSError as error:
        raise ConfigError(str(output), f"cannot be written: {error.strerror}") from None
    return [trace.summary() for trace in traces]


def files_of(words: Iterable[str]) -> list[Path]:
    """Return the traces that words name: files, or directories of them.

    Raises ConfigError where there is none.
    """
    found = []
    for word in words:
        path = Path(word)
        inside = sorted(path.glob(f"*{ENDING}")) if path.is_dir() else [path]
        if not inside:
            raise ConfigError(word, f"has no *{ENDING}")
        found += inside
    return found


def table(summaries: Sequence[RankSummary]) -> str:
    """Return summaries as lines, times in milliseconds a forward."""
    head = (
        "rank", "forwards", "host ms", "device ms", "launches", "without work", "without launch"
    )  # fmt: skip
    rows = [head]
    for each in summaries:
        count = max(1, each.forwards)
        rows.append(
            (
                each.rank,
                str(each.forwards),
                f"{each.host_us / count / 1000:.2f}",
                f"{each.device_us / count / 1000:.2f}" if each.launches else "-",
                str(each.launches),
                str(each.unmatched_launches),
                str(each.unmatched_device),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def _merged(traces: Sequence[_Trace], base_ns: int) -> Iterator[Event]:
    """Return all events on one clock, with processes, devices and launches numbered anew."""
    processes: dict[tuple[int, Any], int] = {}
    arrow = 0
    for place, trace in enumerate(traces):
        late_us = (trace.base_ns - base_ns) / 1000
        for event in trace.events:
            own = (place, event.get("pid"))
            if own not in processes:
                processes[own] = len(processes) + 1
                # Behind those of the ranks before it, whatever the profiler thought.
                number, order = processes[own], {"sort_index": len(processes)}
                yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": order}
                if "name" in event and event.get("pid") is not None:
                    label = {"name": f"{trace.name} ({event['pid']})"}
                    yield {"ph": "M", "name": "process_name", "pid": number, "args": label}
            if event.get("ph") == "M" and event.get("name") in (
                "process_name",
                "process_sort_index",
            ):
                continue
            moved = {**event, "pid": processes[own]}
            if "ts" in event:
                moved["ts"] = event["ts"] + late_us
            yield moved
        for begin, end in trace.arrows():
            arrow += 1
            for kind, event in (("s", begin), ("f", end)):
                yield {
                    "ph": kind,
                    "bp": "e",
                    "cat": _FLOW,
                    "name": _FLOW,
                    "id": arrow,
                    "pid": processes[place, event["pid"]],
                    "tid": event["tid"],
                    "ts": event["ts"] + late_us,
                }


def _read(path: Path) -> _File:
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        _check(text)
        return _decode(text)
    except OSError as error:
        reason = error.strerror or "it is not compressed as its name says"
        raise ConfigError(str(path), f"cannot be read: {reason}") from None
    except (EOFError, zlib.error, msgspec.DecodeError) as error:
        raise ConfigError(str(path), f"is no trace: {error}") from None


def _rank_of(path: Path) -> str:
    """Return the part of a file's name that says whose it is: `DP1-TP0`, perhaps with a stage."""
    found = re.search(r"(?:DP\d+-)?(?:PP\d+-)?TP\d+(?:-[A-Z]+)?$", path.name.removesuffix(ENDING))
    return found[0] if found else path.name.removesuffix(ENDING)


def _correlation(event: Event) -> int | None:
    number = event.get("args", {}).get("correlation")
    return number if isinstance(number, int) else None
