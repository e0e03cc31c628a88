from drumline.contract.outputs import Load
from drumline.control.load_report import HEARTBEAT_US, LoadReport

IDLE, BUSY = Load(0, 0, 0, 10), Load(1, 0, 2, 10)


def test_the_first_round_tells_an_idle_load():
    assert LoadReport().due(IDLE, False, 5)


def test_an_unchanged_load_is_told_once_a_second():
    report = LoadReport()
    told = [t for t in range(0, 3 * HEARTBEAT_US, 10_000) if report.due(IDLE, False, t)]
    assert told == [0, HEARTBEAT_US, 2 * HEARTBEAT_US]


def test_a_changed_load_is_told_at_once_without_outputs():
    report = LoadReport()
    report.due(BUSY, True, 0)
    assert report.due(IDLE, False, 1)
    assert not report.due(IDLE, False, 2)


def test_outputs_always_carry_the_load():
    report = LoadReport()
    assert all(report.due(BUSY, True, t) for t in range(5))
