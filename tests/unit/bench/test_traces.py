"""Merging traces: launches and what the device did for them, rank by rank."""

import gzip
import json
import re

import pytest

from drumline.bench.traces import files_of, merge, table
from drumline.core.errors import ConfigError

FLOW = "ac2g"


def event(kind, name, at, lasts, tid, pid=7, **args):
    return {"ph": "X", "cat": kind, "name": name, "ts": at, "dur": lasts, "pid": pid, "tid": tid,
            "args": args}  # fmt: skip


def traced(*extra):
    """Return the events of a rank with one forward, whose second kernel runs after its end."""
    return [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
        event("round", "dispatch", 90, 5, 7, round=3, rows=1),
        event("user_annotation", "forward 3: DECODE, 1 rows", 100, 50, 9),
        event("cuda_runtime", "cudaLaunchKernel", 110, 2, 9, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 120, 2, 9, correlation=2),
        event("cuda_runtime", "cudaStreamSynchronize", 130, 2, 9, correlation=3),
        event("kernel", "gemm", 115, 10, 7, pid=0, correlation=1),
        event("kernel", "norm", 400, 30, 7, pid=0, correlation=2),
        {"ph": "s", "cat": FLOW, "id": 1, "pid": 7, "tid": 9, "ts": 110, "name": FLOW},
        {"ph": "f", "cat": FLOW, "id": 1, "pid": 0, "tid": 7, "ts": 115, "name": FLOW},
        *extra,
    ]


def write(directory, rank, events, base=1_000_000):
    path = directory / f"p-{rank}.trace.json.gz"
    content = {"traceEvents": events, "baseTimeNanoseconds": base}
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def read(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def test_device_work_counts_for_the_forward_that_launched_it_however_late_it_ran(tmp_path):
    alone = (
        event("cuda_runtime", "cudaMemcpyAsync", 125, 1, 8, correlation=4),
        event("gpu_memcpy", "Memcpy", 126, 4, 20, pid=0, correlation=4),
        event("kernel", "from before", 60, 8, 7, pid=0, correlation=99),
    )
    (told,) = merge([write(tmp_path, "TP0", traced(*alone))], tmp_path / "m")
    assert (told.rank, told.forwards, told.host_us) == ("TP0", 1, 50)
    assert told.device_us == 40, "the second kernel is not cut off at the forward's end"
    assert told.device_alone_us == 4, "another thread launched it in the same time"
    assert (told.launches, told.unmatched_launches, told.unmatched_device) == (4, 1, 1)


def test_numbers_that_several_ranks_use_mean_another_thing_in_each(tmp_path):
    paths = [
        write(tmp_path, "DP0-TP0", traced()),
        # The same processes, devices and correlations, a millisecond of base later.
        write(tmp_path, "DP1-TP0", traced(), base=2_000_000),
    ]
    told = merge(paths, tmp_path / "m")
    assert [(each.rank, each.device_us) for each in told] == [("DP0-TP0", 40), ("DP1-TP0", 40)]
    events = read(tmp_path / "m")["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["DP0-TP0 (0)", "DP0-TP0 (7)", "DP1-TP0 (0)", "DP1-TP0 (7)"]
    forwards = [e for e in events if e["name"].startswith("forward")]
    assert [(names[e["pid"]], e["ts"]) for e in forwards] == [
        ("DP0-TP0 (7)", 100),
        ("DP1-TP0 (7)", 1100),
    ]
    arrows = {}
    for e in events:
        if e.get("cat") == FLOW:
            arrows.setdefault(e["id"], []).append((names[e["pid"]], e["ph"], e["ts"]))
    ours = [each for each in arrows.values() if each[0][0].startswith("DP1")]
    assert ours == [
        [("DP1-TP0 (7)", "s", 1090), ("DP1-TP0 (7)", "f", 1100)],
        [("DP1-TP0 (7)", "s", 1110), ("DP1-TP0 (0)", "f", 1115)],
        [("DP1-TP0 (7)", "s", 1120), ("DP1-TP0 (0)", "f", 1400)],
    ]
    assert len(arrows) == 6


def test_a_table_has_a_line_for_each_rank_and_no_device_time_where_there_is_no_device(tmp_path):
    host = [event("user_annotation", "forward 3: DECODE, 1 rows", 100, 5000, 9)]
    paths = [write(tmp_path, "TP0", traced()), write(tmp_path, "TP1", host)]
    lines = [line.split("  ") for line in table(merge(paths, tmp_path / "m")).splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[1] == ["TP0", "1", "0.05", "0.04", "3", "1", "0"]
    assert cells[2] == ["TP1", "1", "5.00", "-", "0", "0", "0"]


def test_what_cannot_be_merged_is_refused_by_name_and_writes_nothing(tmp_path):
    good = write(tmp_path, "TP0", traced())
    other = tmp_path / "other"
    other.mkdir()
    damaged = tmp_path / "p-TP1.trace.json.gz"
    for content in (b"{}", gzip.compress(b"[1"), good.read_bytes()[:-20], gzip.compress(b"{}")):
        damaged.write_bytes(content)
        with pytest.raises(ConfigError, match=r"p-TP1\.trace"):
            merge([good, damaged], tmp_path / "m")
    with pytest.raises(ConfigError, match="two files are of rank TP0; merge one profile only"):
        merge([good, write(other, "TP0", traced())], tmp_path / "m")
    with pytest.raises(ConfigError, match="exists; name another file with --output"):
        merge([good], good)
    with pytest.raises(ConfigError, match="No such file"):
        merge([tmp_path / "none"], tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("foreign", "why"),
    [
        (3, "Expected `object`, got `int`"),
        ({"cat": "kernel", "name": "gemm", "ts": 1, "pid": 0, "tid": 1}, "'kernel' has no 'dur'"),
        ({"cat": "kernel", "ts": "soon"}, "Expected `float`, got `str`"),
        ({"cat": "cpu_op", "args": [1]}, "Expected `object`, got `array`"),
        ({"ph": "M", "pid": [1]}, "Expected `int | str`, got `array`"),
        (event("round", "dispatch", 1, 1, 1, rows=2), "'round' has no 'round'"),
    ],
)
def test_an_event_that_is_none_is_told_with_its_file_and_fault(tmp_path, foreign, why):
    with pytest.raises(ConfigError, match=re.escape(why)) as told:
        merge([write(tmp_path, "TP0", [foreign])], tmp_path / "m")
    assert "p-TP0.trace.json.gz" in str(told.value)
    assert not (tmp_path / "m").exists()


def test_a_directory_stands_for_the_traces_in_it(tmp_path):
    first, second = write(tmp_path, "TP0", []), write(tmp_path, "TP1", [])
    (tmp_path / "notes.txt").touch()
    assert files_of([str(tmp_path)]) == [first, second]
    assert files_of([str(second)]) == [second]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no"):
        files_of([str(tmp_path / "empty")])
