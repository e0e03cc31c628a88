"""What a recording of the forward thread holds, and what is refused before anything begins."""

import gzip
import json
import os

import pytest

from drumline.contract.profile import Recording, Span, Stage
from drumline.device.profiler import _PIECE

PROMPT = list(range(3, 20))


def recording(root, **changes):
    fields = {
        "root": str(root), "directory": "", "name": "p-TP0", "rank": "TP0", "activities": None,
        "stack": False, "shapes": False,
    }  # fmt: skip
    return Recording(**fields | changes)


def events(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_a_file_holds_each_forward_with_its_operators_and_the_control_threads_rounds(rig, tmp_path):
    rank = rig("llama")
    rank.generate(1, "before", PROMPT, 2)
    assert rank.plane.open_profile(recording(tmp_path / "new")) is None
    rank.plane.start_profile(None)
    first = rank.round + 1
    rank.generate(2, "seen", PROMPT, 3)
    clock = rank.built.handle._profiler._clock
    now = clock.now_us()
    assert rank.plane.stop_profile((Span("plan", now - 50, now, {"round": first}),)) is None
    rank.generate(3, "after", PROMPT, 2)
    found = events(tmp_path / "new" / "p-TP0.trace.json.gz")
    named = {e["name"]: e for e in found if e["name"].startswith("forward ")}
    assert list(named) == [
        f"forward {first}: EXTEND, 1 rows, 17 tokens, 1 with prompts",
        f"forward {first + 1}: DECODE, 1 rows, 1 tokens, 0 with prompts",
        f"forward {first + 2}: DECODE, 1 rows, 1 tokens, 0 with prompts",
    ]
    for forward in named.values():
        inside = [
            e["name"]
            for e in found
            if e.get("cat") in {"cpu_op", "user_annotation"}
            and e["tid"] == forward["tid"]
            and forward["ts"] <= e["ts"] < forward["ts"] + forward["dur"]
        ]
        assert {"kernels: layers", "kernels: head", "aten::empty"} <= set(inside)
    (span,) = [e for e in found if e.get("cat") == "round"]
    assert (span["name"], span["dur"], span["args"]) == ("plan", 50, {"round": first})
    # On one clock: it was taken after the last forward, and soon.
    last = list(named.values())[-1]
    assert 0 <= span["ts"] + 50 - (last["ts"] + last["dur"]) < 5e6
    threads = {e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert {"control", "forward"} <= threads


def test_what_is_recorded_changes_no_token(rig, tmp_path):
    rank = rig("llama")
    alone = rank.generate(1, "alone", PROMPT, 6)
    how = {"stack": True, "shapes": True, "activities": ("CPU", "MEM")}
    assert rank.plane.open_profile(recording(tmp_path, **how)) is None
    rank.plane.start_profile(Stage.EXTEND)
    assert rank.generate(2, "seen", PROMPT, 6) == alone
    assert rank.plane.stop_profile(()) is None
    found = events(tmp_path / "p-TP0-EXTEND.trace.json.gz")
    kinds = {e.get("cat") for e in found}
    assert "python_function" in kinds, "stacks"
    assert any(e["name"] == "[memory]" for e in found)
    assert any(e.get("args", {}).get("Input Dims") for e in found), "shapes"


def test_a_long_recording_is_written_in_pieces_and_has_every_forward_once(rig, tmp_path):
    rank = rig("llama")
    assert rank.plane.open_profile(recording(tmp_path)) is None
    rank.plane.start_profile(None)
    first, count = rank.round + 1, 3 * _PIECE + 2
    rank.generate(1, "r", PROMPT, count)
    assert rank.plane.stop_profile(()) is None
    found = events(tmp_path / "p-TP0.trace.json.gz")
    forwards = [e for e in found if e["name"].startswith("forward ")]
    assert [int(e["name"].split()[1][:-1]) for e in forwards] == [*range(first, first + count)]
    times = [e["ts"] for e in forwards]
    assert times == sorted(times), "on one clock"


REFUSED = [
    ({"activities": ("CPU", "GPU")}, "activity 'GPU' cannot be recorded here; CPU, MEM can"),
    ({"activities": ("PROTON",)}, "activity 'PROTON' cannot be recorded here; CPU, MEM can"),
    ({"directory": "/etc"}, "output_dir '/etc' is outside of"),
    ({"directory": "../beside"}, "output_dir '../beside' is outside of"),
    ({"directory": "link/in"}, "output_dir 'link/in' is outside of"),
    ({"directory": "file"}, "cannot write into"),
    ({"directory": "n" * 300}, "cannot write into"),
    ({"directory": "circle"}, "output_dir 'circle' is no path"),
    ({"directory": "a\0b"}, "output_dir 'a\\x00b' is no path"),
    ({"name": "taken-TP0"}, "exists; give another profile_id"),
]


@pytest.mark.parametrize(("how", "told"), REFUSED)
def test_what_cannot_be_recorded_or_written_is_refused_before_anything_begins(
    rig, tmp_path, how, told
):
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    (root / "circle").symlink_to("circle")
    (root / "file").touch()
    (root / "taken-TP0-DECODE.trace.json.gz").touch()
    before = sorted(os.walk(tmp_path))
    rank = rig("llama")
    assert told in rank.plane.open_profile(recording(root, **how))
    assert sorted(os.walk(tmp_path)) == before
    assert rank.generate(1, "r", PROMPT, 2), "it serves on"


def test_a_file_that_is_there_meanwhile_is_not_written_over_and_the_rank_serves_on(rig, tmp_path):
    rank = rig("llama")
    assert rank.plane.open_profile(recording(tmp_path)) is None
    rank.plane.start_profile(None)
    path = tmp_path / "p-TP0.trace.json.gz"
    path.write_bytes(b"somebody else's")
    assert "was not written" in rank.plane.stop_profile(())
    assert path.read_bytes() == b"somebody else's"
    assert rank.generate(1, "r", PROMPT, 2)


def test_a_trace_that_cannot_be_read_is_told_at_the_stop_and_the_rank_serves_on(
    rig, tmp_path, monkeypatch
):
    rank = rig("llama")
    assert rank.plane.open_profile(recording(tmp_path)) is None
    rank.plane.start_profile(None)
    monkeypatch.setattr("drumline.device.profiler._decode_events", lambda _: [])
    assert "the trace does not say what its clock shows" in rank.plane.stop_profile(())
    assert not list(tmp_path.iterdir())
    assert rank.generate(1, "r", PROMPT, 2)
