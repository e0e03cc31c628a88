"""Which forwards a profile has, when it begins and ends, and what is said of it."""

import numpy as np
import pytest

from drumline.contract.plan import Batch
from drumline.contract.profile import ProfileAsked
from drumline.control.profiles import Place, Profiles
from drumline.replay.clock import ManualClock

PROMPTS, DECODES = "P", "D"


class Recorder:
    """A data plane that notes what it is told, and whose file may not be writable."""

    def __init__(self):
        self.said = []
        self.opened = []
        self.unfit = None
        self.unwritable = None

    def open_profile(self, recording):
        self.opened.append(recording)
        return self.unfit

    def start_profile(self, stage):
        self.said.append(f"start {stage or 'all'}")

    def stop_profile(self, spans):
        self.said.append("stop")
        return self.unwritable


def batch(kind):
    one = np.ones(1, np.int32)
    return Batch(
        rows=one, generations=one, input_lengths=one, prefix_lengths=one,
        extends=int(kind == PROMPTS),
    )  # fmt: skip


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def profiles(recorder):
    return Profiles(recorder, Place("/set/aside", "DP1-TP0"), ManualClock())


def begin(profiles, **asked):
    fault = profiles.open(ProfileAsked(profile_id="p", **asked), 7)
    return fault or profiles.settle(True)


def forward(profiles, recorder, kinds):
    """Dispatch forwards of these kinds, and note them among what the recorder is told."""
    for kind in kinds:
        profiles.before_forward(batch(kind))
        recorder.said.append(kind)
        profiles.after_dispatch()


BOTH = {"profile_by_stage": True}

SEQUENCES = [
    # asked, forwards, what happens around them
    ({}, "PD", ["start all", "P", "D"]),
    ({"num_steps": 2}, "PDD", ["start all", "P", "D", "stop", "D"]),
    # Two forwards ran before it was asked for, so the next is the third.
    ({"start_step": 4, "num_steps": 1}, "DDD", ["D", "start all", "D", "stop", "D"]),
    ({"start_step": 1, "num_steps": 1}, "DD", ["start all", "D", "stop", "D"]),
    (
        BOTH | {"num_steps": 1},
        "PPDD",
        ["start EXTEND", "P", "stop", "P", "start DECODE", "D", "stop", "D"],
    ),
    # Forwards of the other kind, once those have their file, are among those of this one.
    (
        BOTH | {"num_steps": 2},
        "PDPDD",
        ["start EXTEND", "P", "stop", "start DECODE", "D", "P", "D", "stop", "D"],
    ),
    (
        BOTH | {"num_steps": 3},
        "DPPP",
        ["start DECODE", "D", "stop", "start EXTEND", "P", "P", "P", "stop"],
    ),
]


@pytest.mark.parametrize(("asked", "kinds", "said"), SEQUENCES)
def test_the_forwards_that_were_asked_for_are_recorded_and_no_others(
    profiles, recorder, asked, kinds, said
):
    forward(profiles, recorder, "DD")
    recorder.said.clear()
    begin(profiles, **asked)
    forward(profiles, recorder, kinds)
    assert recorder.said == said


def test_a_profile_that_was_given_no_number_ends_by_itself_all_the_same(profiles, recorder):
    told = begin(profiles)
    assert told == "profile p: from forward 1 on, 20 forwards or until stop_profile"
    forward(profiles, recorder, "D" * 30)
    assert recorder.said == ["start all", *["D"] * 20, "stop", *["D"] * 10]
    assert profiles.stop() == (
        None,
        "profile p: 20 forwards, in /set/aside/p-*.trace.json.gz of each rank",
    )


def test_a_second_start_is_refused_until_the_first_one_ended(profiles, recorder):
    begin(profiles, num_steps=1)
    refusal = "a profile is already in progress; call stop_profile first"
    assert begin(profiles) == refusal
    forward(profiles, recorder, "D")
    assert begin(profiles).startswith("profile p: from forward 2 on")
    assert len(recorder.opened) == 2, "the refused one was not looked at"


def test_a_stop_without_a_start_is_refused_and_each_end_is_told_once(profiles, recorder):
    refusal = ("no profile is in progress; call start_profile first", "")
    assert profiles.stop() == refusal
    begin(profiles)
    assert profiles.stop() == (None, "profile p: nothing ran, so there is no file")
    assert profiles.stop() == refusal
    begin(profiles)
    forward(profiles, recorder, "PD")
    assert profiles.stop()[1].startswith("profile p: 2 forwards")
    assert recorder.said[-1] == "stop"
    assert profiles.stop() == refusal


def test_what_one_rank_cannot_record_begins_nowhere(profiles, recorder):
    recorder.unfit = "activity 'PROTON' cannot be recorded here; CPU, MEM can"
    assert begin(profiles, activities=("PROTON",)) == recorder.unfit
    assert profiles.settle(False) == ""
    recorder.unfit = None
    assert profiles.open(ProfileAsked(), 7) is None
    assert profiles.settle(False) == "", "another rank could not"
    forward(profiles, recorder, "PD")
    assert recorder.said == ["P", "D"]


def test_a_file_that_could_not_be_written_is_told_at_the_stop(profiles, recorder):
    recorder.unwritable = "no space left"
    begin(profiles, num_steps=1)
    forward(profiles, recorder, "PD")
    assert profiles.stop() == ("no space left", "")


def test_a_rank_records_under_its_own_name_and_all_at_one_place(profiles, recorder):
    begin(profiles, output_dir="today", with_stack=False, record_shapes=True)
    (recording,) = recorder.opened
    assert (recording.root, recording.directory) == ("/set/aside", "today")
    assert (recording.name, recording.rank) == ("p-DP1-TP0", "DP1-TP0")
    assert (recording.stack, recording.shapes, recording.activities) == (False, True, None)
    assert profiles.open(ProfileAsked(), 7) is not None


def test_the_control_thread_notes_what_it_did_while_there_is_a_profile(recorder):
    clock = ManualClock()
    profiles = Profiles(recorder, Place(), clock)
    told = []
    recorder.stop_profile = told.extend
    profiles.trace.did("plan")
    begin(profiles)
    profiles.trace.begin(clock.now_us())
    profiles.before_forward(batch(PROMPTS))
    clock.advance(3)
    profiles.trace.did("plan", {"round": 4})
    clock.advance(5)
    profiles.trace.did("commit")
    profiles.stop()
    assert [(span.name, span.end_us - span.begin_us, span.facts) for span in told] == [
        ("plan", 3, {"round": 4}),
        ("commit", 5, {}),
    ]
    profiles.trace.did("tail")
    assert profiles.trace.take() == ()


def test_a_profile_that_ends_before_any_forward_leaves_no_notes_behind(profiles):
    begin(profiles)
    profiles.trace.did("plan")
    profiles.stop()
    assert not profiles.trace.on
    assert profiles.trace.take() == ()
