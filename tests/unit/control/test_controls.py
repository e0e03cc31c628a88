import pytest

from drumline.contract.messages import CallAsked, CallReply
from drumline.contract.regions import Region
from drumline.control.controls import Controls
from drumline.control.operations import Done


def test_an_unknown_operation_is_answered_by_name():
    controls = Controls()
    controls.ask(CallAsked(4, "levitate"))
    (reply,) = controls.take_replies()
    assert (reply.call_id, reply.success) == (4, False)
    assert "'levitate'" in reply.message
    assert "flush_cache" in reply.message


def test_a_flush_is_answered_once_the_gate_ran_it():
    controls = Controls()
    controls.ask(CallAsked(1, "flush_cache", (0.0,)))
    controls.ask(CallAsked(2, "flush_cache"))
    assert controls.flush_wanted
    assert controls.take_replies() == []
    controls.flushed(True)
    assert controls.take_replies() == [CallReply(1, True), CallReply(2, True)]
    assert not controls.flush_wanted


def paused(*calls):
    """Return the state after these calls, numbered from 1, and their answers so far."""
    controls = Controls()
    for call_id, (method, *args) in enumerate(calls, 1):
        controls.ask(CallAsked(call_id, method, tuple(args)))
    answers = {reply.call_id: (reply.success, reply.message) for reply in controls.take_replies()}
    return controls, answers


PAUSE, RESUME, ASK = "pause_scheduler", "resume_scheduler", "is_scheduler_paused"

TRANSITIONS = [
    # calls                                withholding, frozen, draining, answers
    ([(ASK,)], False, False, False, {1: (True, "false")}),
    ([(PAUSE, "keep"), (ASK,)], True, True, False, {1: (True, ""), 2: (True, "true")}),
    ([(PAUSE, {"mode": "keep"})], True, True, False, {1: (True, "")}),
    ([(PAUSE, "wait")], True, False, True, {}),
    ([(PAUSE, "abort")], True, False, True, {}),
    ([(PAUSE,)], True, False, True, {}),
    ([(PAUSE, "keep"), (RESUME,)], False, False, False, {1: (True, ""), 2: (True, "")}),
    (
        [(PAUSE, "wait"), (PAUSE, "keep")],
        True,
        False,
        True,
        {2: (False, "a pause is already in progress")},
    ),
    (
        [(PAUSE, "wait"), (RESUME,)],
        False,
        False,
        False,
        {1: (False, "resumed before the pause drained"), 2: (True, "")},
    ),
    (
        [(PAUSE, "softly")],
        False,
        False,
        False,
        {1: (False, "invalid pause mode 'softly'; it is one of abort, wait, keep")},
    ),
    ([(RESUME,)], False, False, False, {1: (True, "")}),
]


@pytest.mark.parametrize(("calls", "withholding", "frozen", "draining", "answers"), TRANSITIONS)
def test_pause_and_resume(calls, withholding, frozen, draining, answers):
    controls, answered = paused(*calls)
    assert (controls.withholding, controls.frozen, controls.draining) == (
        withholding,
        frozen,
        draining,
    )
    assert answered == answers


def test_a_pause_that_drains_is_answered_once_nothing_runs():
    controls, _ = paused((PAUSE, "abort"))
    controls.drained()
    controls.drained()
    assert controls.take_replies() == [CallReply(1, True)]
    assert controls.withholding


RELEASE, WAKE, SLEEPING = (
    "release_memory_occupation",
    "resume_memory_occupation",
    "is_sleeping",
)

TAGS = [
    ((), (Region.WEIGHTS, Region.KV_CACHE)),
    ((None,), (Region.WEIGHTS, Region.KV_CACHE)),
    (({"tags": ["kv_cache"]},), (Region.KV_CACHE,)),
    ((["kv_cache", "weights"],), (Region.WEIGHTS, Region.KV_CACHE)),
]


@pytest.mark.parametrize(("args", "regions"), TAGS)
def test_a_release_names_what_it_gives_back_by_tags(args, regions):
    controls, answers = paused((RELEASE, *args))
    assert controls.releasing == regions
    assert controls.withholding
    assert not answers
    controls.released(None)
    controls.ask(CallAsked(2, SLEEPING))
    assert controls.take_replies() == [CallReply(1, True), CallReply(2, True, "true")]
    assert controls.gone == regions
    assert controls.frozen


@pytest.mark.parametrize("args", [(None, True), ({"drop_weights": True},)])
def test_weights_that_were_not_kept_are_missed_until_others_are_loaded(args):
    controls, _ = paused((RELEASE, *args))
    assert controls.drops
    assert controls.refusing is None, "what arrives while it drains is served after the load"
    controls.released(None)
    controls.ask(CallAsked(2, WAKE))
    controls.ask(CallAsked(3, RESUME))
    controls.ask(CallAsked(4, "is_unloaded"))
    told = {reply.call_id: (reply.success, reply.message) for reply in controls.take_replies()}
    assert told == {
        1: (True, ""), 2: (True, ""), 3: (False, controls.refusing), 4: (True, "true"),
    }  # fmt: skip
    assert controls.refusing.startswith("the weights were dropped, and none are loaded; call")
    assert (controls.standing, controls.frozen, controls.lacking) == ("unloaded", True, True)
    for call_id, (done, standing) in enumerate(
        [(Done(False, "x"), "unloaded"), (Done(True, "in part"), "unloaded"),
         (Done(True, "all", whole=True), "serving")], 5,
    ):  # fmt: skip
        controls.ask(CallAsked(call_id, "update_weight_from_disk", ("x",)))
        controls.ran(done)
        assert controls.standing == standing
    assert controls.refusing is None


def test_a_word_on_keeping_the_weights_that_is_none_is_refused():
    controls, answers = paused((RELEASE, None, "yes"))
    assert answers == {1: (False, "drop_weights is true or false, not 'yes'")}
    assert not controls.withholding


@pytest.mark.parametrize("method", [RELEASE, WAKE])
@pytest.mark.parametrize("tags", ["weights", ["wights"], [3], [["weights"]], {"tags": [{}]}, 7])
def test_tags_that_are_none_are_refused_with_those_there_are(method, tags):
    controls, answers = paused((method, tags), (SLEEPING,))
    success, message = answers[1]
    assert not success
    assert message.startswith("invalid tags")
    assert message.endswith("there are weights, kv_cache")
    assert not controls.withholding
    assert answers[2] == (True, "false")
