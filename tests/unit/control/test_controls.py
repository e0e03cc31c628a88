from drumline.contract.messages import CallAsked, CallReply
from drumline.control.controls import Controls


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


def test_an_engine_without_a_pause_is_not_paused():
    controls = Controls()
    controls.ask(CallAsked(1, "is_scheduler_paused"))
    assert controls.take_replies() == [CallReply(1, True, "false")]
