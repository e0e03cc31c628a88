"""A forward on CUDA lies there as a whole, waits for nothing, and says what one on a CPU does.

On an emulated device where there is no GPU; `make gpu-check` runs it on one.
"""

import numpy as np
import pytest
import torch

from drumline.contract.ports import LogprobPlan
from drumline.contract.request import Pooling, Sampling
from drumline.core.config import DeviceChecks
from drumline.core.errors import InvariantError
from drumline.device.forward_thread import ForwardThread
from drumline.device.guards import ForwardChecks
from drumline.device.staging import Download

from .conftest import GREEDY, Rig, ints, small_config
from .emulated_cuda import DEVICE, MixedError

RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(0, 320, size).tolist() for size in (50, 21, 3, 37, 18, 40, 9)]
WAYS = [
    GREEDY,
    Sampling(temperature=0.9, seed=1),
    Sampling(temperature=1.1, top_k=20, top_p=0.9, seed=2),
    Sampling(temperature=1.3, top_p=0.8, min_p=0.01, typical_p=0.9, seed=3),
    Sampling(top_k=1, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    Sampling(temperature=0.7, seed=4, logit_bias={5: 3.0}, bad_words=((7,), (8, 9)), min_p=0.02),
    Sampling(temperature=1.0, seed=5, allowed_ids=tuple(range(10, 200))),
]


emulation_alone = pytest.mark.skipif(
    torch.cuda.is_available(), reason="is about the emulated device, and there is a GPU"
)


@pytest.fixture
def thread():
    thread = ForwardThread()
    yield thread
    thread.stop()


@pytest.fixture
def cuda(emulation, thread):
    return emulation(thread)


def played(device):
    """Serve every way of drawing at once, with chunks beside decodes; returns all results."""
    parts = {}
    for row, (prompt, way) in enumerate(zip(PROMPTS, WAYS, strict=True), 1):
        parts[row] = device.start(
            row,
            f"r{row}",
            prompt,
            way,
            prompt_ids=ints(*prompt),
            logprob_ids=(3, 4) if row == 2 else (),
            prompt_logprobs_from=2 if row == 1 else -1,
            pooling=Pooling.MEAN if row == 4 else None,
        )
    tickets = []

    def execute(extends, decodes, logprobs=None):
        begun = [parts.pop(row) for row, _ in extends if row in parts]
        joined = {
            name: tuple(each for part in begun for each in part[name])
            for name in ("bound", "patches")
        }
        plan = device.plan(extends, decodes, **joined)
        tickets.append(device.execute(plan, logprobs))

    execute(
        [(1, 16), (2, 100), (3, 100)],
        [],
        LogprobPlan(ints(1, 2), ints(3, 0), prompts=ints(0), prompts_top=ints(2)),
    )
    execute(
        [(1, 16), (4, 100), (5, 100)],
        [2, 3],
        LogprobPlan(ints(3), ints(2), prompts=ints(0), prompts_top=ints(2), pooled=ints(1)),
    )
    execute([(1, 100), (6, 100), (7, 100)], [2, 3, 4, 5], LogprobPlan(ints(3, 4), ints(5, 1)))
    for _ in range(4):
        execute([], range(1, 8), LogprobPlan(ints(1), ints(2)))
    return [device.plane.complete(ticket) for ticket in tickets]


def close(left, right):
    assert [row.index for row in left] == [row.index for row in right]
    for one, other in zip(left, right, strict=True):
        assert one.sampled == pytest.approx(other.sampled, abs=1e-4)
        assert one.top_ids == other.top_ids
        for values, others in zip(one.top_values, other.top_values, strict=True):
            assert values == pytest.approx(others, abs=1e-4)


@pytest.mark.parametrize("family", ["llama, biased", "qwen3", "mistral, window"])
def test_a_device_says_what_the_host_does_and_nothing_waits(
    checkpoint, rig, cuda, thread, monkeypatch, family
):
    expected = played(rig(family))
    device = Rig(small_config(checkpoint(family)[1]), thread, DEVICE)
    assert device.built.specs.device.startswith("cuda (")
    assert device.built.specs.backend.startswith("torch")
    thread.serve_checked(ForwardChecks(DeviceChecks.ERROR, DEVICE))
    results = played(device)
    for one, other in zip(results, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.counts.tolist() == other.counts.tolist()
        assert not len(one.nan_indices) + len(one.stuck)
        close(one.logprobs, other.logprobs)
        close(one.prompt_logprobs, other.prompt_logprobs)
        for mine, theirs in zip(one.pooled, other.pooled, strict=True):
            assert mine.values == pytest.approx(theirs.values, abs=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda there: there.sum().item(),
        lambda there: bool((there > 0).any()),
        lambda there: there[there > 0],
        lambda there: there.nonzero(),
        lambda there: there.cpu(),
        lambda there: there.tolist(),
        lambda there: torch.ones(3).to(DEVICE),
        lambda there: there.copy_(torch.ones(3)),
    ],
)
def test_a_forward_thread_that_serves_is_refused_a_wait(cuda, thread, wrong):
    there = thread.call(lambda: torch.zeros(3, device=DEVICE))
    thread.serve_checked(ForwardChecks(DeviceChecks.ERROR, DEVICE))
    thread.submit(lambda: there.add_(1)).wait()
    thread.call(lambda: there.sum().item())
    with pytest.raises(InvariantError, match=r"WaitedError|not supported|synchronizing"):
        thread.submit(lambda: wrong(there)).wait()


@emulation_alone
@pytest.mark.parametrize(
    "wrong",
    [
        lambda there: there + torch.ones(3),
        lambda there: there[torch.tensor([1])],
        lambda there: there.index_fill_(0, torch.tensor([1]), 2),
        lambda there: torch.cat((there, torch.ones(1))),
    ],
)
def test_the_emulated_device_refuses_what_lies_elsewhere(cuda, thread, wrong):
    there = thread.call(lambda: torch.zeros(3, device=DEVICE))
    with pytest.raises(MixedError):
        thread.call(lambda: wrong(there))


@emulation_alone
def test_what_comes_down_is_there_once_it_is_waited_for(cuda, thread):
    there = thread.call(lambda: torch.arange(5, device=DEVICE))
    download = thread.call(lambda: Download([there], DEVICE))
    assert not download.here
    assert (download._values[0] != torch.arange(5)).all()
    assert download.wait()[0].tolist() == [0, 1, 2, 3, 4]
