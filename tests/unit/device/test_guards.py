"""What a rank that serves may not do is refused, or told, where it happens."""

import logging
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from drumline.core.config import DeviceChecks
from drumline.core.errors import InvariantError
from drumline.device.forward_thread import ForwardThread
from drumline.device.guards import ForwardChecks, NoDevice

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "operation",
    [
        lambda held: torch.zeros(3),
        lambda held: held + 1,
        lambda held: held.add_(1),
        lambda held: held[0].item(),
        lambda held: torch.from_numpy(np.ones(3)).sum(),
        lambda held: bool(held[0] == 0),
    ],
    ids=["make", "add", "add in place", "read", "sum", "decide"],
)
@pytest.mark.parametrize("inference", [False, True])
def test_no_operation_of_torch_runs_where_no_device_is_reached(operation, inference):
    held = torch.zeros(3)
    with torch.inference_mode(inference), NoDevice(), pytest.raises(InvariantError, match="no dev"):
        operation(held)
    operation(torch.zeros(3))


def test_other_threads_and_numpy_go_on_meanwhile():
    thread = ForwardThread()
    with NoDevice():
        assert np.ones(3).sum() == 3
        assert thread.call(lambda: torch.ones(3).sum().item()) == 3
    thread.stop()


@pytest.fixture
def forward():
    """A forward thread whose start-up is over, by the way it is checked."""
    made = []

    def of(checks):
        thread = ForwardThread()
        thread.serve_checked(ForwardChecks(checks, CPU))
        made.append(thread)
        return thread

    yield of
    for thread in made:
        thread.stop()


def load_a_compiler():
    # Nobody has loaded what there is not.
    import torch._inductor.of_no_such_name  # noqa: F401, PLC0415


def start_a_compiler():
    subprocess.run([sys.executable, "-c", ""], check=True)


@pytest.mark.parametrize("compiles", [load_a_compiler, start_a_compiler])
def test_a_task_that_compiles_ends_the_work_of_a_thread_that_serves(forward, compiles):
    thread = forward(DeviceChecks.ERROR)
    with pytest.raises(InvariantError, match="while it serves"):
        thread.submit(compiles).wait()
    with pytest.raises(InvariantError):
        thread.check()


def test_a_warning_names_the_place_and_the_work_goes_on(forward, caplog):
    thread = forward(DeviceChecks.WARN)
    with caplog.at_level(logging.WARNING):
        thread.submit(start_a_compiler).wait()
    (record,) = caplog.records
    assert sys.executable in record.getMessage()
    assert "start_a_compiler" in record.stack_info
    assert thread.call(lambda: 7) == 7


def test_start_up_other_threads_and_a_thread_that_ended_may_compile(forward):
    thread = ForwardThread()
    thread.call(start_a_compiler)
    thread.serve_checked(ForwardChecks(DeviceChecks.ERROR, CPU))
    start_a_compiler()
    helper = threading.Thread(target=start_a_compiler)
    helper.start()
    helper.join()
    thread.stop()


def test_only_tasks_that_somebody_waits_for_may_wait_for_the_device(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    thread = ForwardThread()
    thread.call(lambda: modes.append("starting"))
    thread.serve_checked(ForwardChecks(DeviceChecks.ERROR, torch.device("cuda")))
    thread.submit(lambda: modes.append("forward")).wait()
    thread.call(lambda: modes.append("asked"))
    thread.finish(lambda: modes.append("finished"))
    thread.stop()
    assert modes[:3] == ["starting", "error", "forward"]
    assert modes[3:6] == ["default", "asked", "error"]
    assert modes[6:] == ["default", "finished", "error", "default"]
