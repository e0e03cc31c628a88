"""What forwards on CUDA are made of, part by part beside a CPU's: masks, histories, weights.

On an emulated device where there is no GPU, and on one where there is.
"""

import numpy as np
import pytest
import torch

from drumline.contract.grammar import Attachment
from drumline.contract.ports import HistorySeeds
from drumline.contract.request import Admission, ProcessorCall, Sampling
from drumline.core.config import DeviceChecks
from drumline.core.gguf_file import BLOCKS
from drumline.device.forward_thread import ForwardThread
from drumline.device.guards import ForwardChecks
from drumline.device.history import TokenHistory
from drumline.device.sampling.sampler import Sampler
from drumline.device.staging import Download
from drumline.device.weights.dequantize import dequantize

from .conftest import ints
from .emulated_cuda import DEVICE

CPU = torch.device("cpu")
VOCAB = 6000
ROWS = range(1, 7)


@pytest.fixture
def thread(emulation):
    thread = ForwardThread()
    emulation(thread)
    yield thread
    thread.stop()


class Allowing:
    """A grammar that allows some ids, always the same, and its own matcher."""

    stop_ids = (0,)
    terminated = False

    def __init__(self, ids):
        self.words = np.zeros(-(-VOCAB // 32), np.uint32)
        np.bitwise_or.at(self.words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        self.taken = []

    def matcher(self):
        return self

    def fill(self, masks, row):
        masks[row] = self.words.view(np.int32)

    def accept(self, token):
        self.taken.append(token)
        return True


class Favour:
    """A processor that reads what it is given, as foreign code may."""

    def process(self, logits, rows):
        for row, one in enumerate(rows):
            logits[row, one.params] += 3 + float(logits[row].max()) + len(one.answer)


def sampler_on(device):
    sampler = Sampler(7, VOCAB, {"favour": Favour()}, device=device)
    random = np.random.default_rng(8)
    grammars = [Allowing(random.permutation(VOCAB)[:count]) for count in (1, 90, 3000, VOCAB - 100)]
    ways = [Sampling(top_k=1), Sampling(seed=1), Sampling(seed=2, top_p=0.9, temperature=2.0)]
    for row in ROWS:
        rid = f"r{row}"
        call = (ProcessorCall("favour", 40 + row),) if row in {2, 5} else ()
        way = ways[row % 3]
        sampler.admit([Admission(rid=rid, prompt_tokens=1, sampling=way, processors=call)])
        if row <= len(grammars):
            sampler.attach([Attachment(rid, grammars[row - 1])])
        sampler.bind(row, rid)
    return sampler, grammars


def test_held_rows_and_processed_ones_draw_what_they_do_on_a_cpu(thread):
    (cpu, mine), (gpu, theirs) = sampler_on(CPU), thread.call(lambda: sampler_on(DEVICE))
    thread.serve_checked(ForwardChecks(DeviceChecks.ERROR, DEVICE))
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        logits = 4 * torch.randn((len(ROWS), VOCAB), generator=generator)
        there = thread.call(lambda logits=logits: logits.to(DEVICE))
        where = ints(*ROWS), ints(*[step + 1] * len(ROWS))
        expected = cpu.sample(logits, *where)

        def run(there=there, where=where):
            sampled = gpu.sample(there, *where)
            return sampled, Download([sampled.tokens, sampled.bad, sampled.stuck], DEVICE)

        sampled, download = thread.submit(run).wait()
        tokens, bad, stuck = download.wait()
        assert tokens.tolist() == expected.tokens.tolist()
        assert not bad.any()
        assert not stuck.any()
        assert (sampled.faults, sampled.failed) == ((), ())
    assert [each.taken for each in theirs] == [each.taken for each in mine]


def test_a_row_that_nothing_is_left_for_is_told(thread):
    def run():
        sampler = Sampler(3, VOCAB, device=DEVICE)
        for row in (1, 2):
            sampler.admit([Admission(rid=str(row), prompt_tokens=1, sampling=Sampling(seed=row))])
            if row == 1:
                sampler.attach([Attachment("1", Allowing(np.zeros(0, np.int64)))])
            sampler.bind(row, str(row))
        logits = torch.zeros((2, VOCAB), device=DEVICE)
        sampled = sampler.sample(logits, ints(1, 2), ints(1, 1))
        return Download([sampled.stuck, sampled.bad], DEVICE)

    stuck, bad = thread.call(run).wait()
    assert (stuck.tolist(), bad.tolist()) == ([True, False], [False, False])


def test_a_history_lies_on_the_device(thread):
    seeds = HistorySeeds(ints(2), ints(0), ints(3), ints(11, 12, 13))

    def windows(device):
        history = TokenHistory(4, 20, device)
        history.seed(seeds)
        positions = torch.arange(3, 5).to(device)
        read = history.append(ints(2), ints(2), positions, torch.tensor([14, 15]).to(device))
        return Download([read.windows(5)], device)

    expected = windows(CPU).wait()[0].tolist()
    assert expected == [[13, 12, 11, -1, -1], [14, 13, 12, 11, -1]]
    assert thread.call(lambda: windows(DEVICE)).wait()[0].tolist() == expected


@pytest.mark.parametrize("kind", [*BLOCKS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_every_kind_become_floats_on_the_device(thread, kind, dtype):
    values, size = BLOCKS[kind]
    data = torch.from_numpy(np.random.default_rng(int(kind)).integers(0, 60, 8 * size, np.uint8))
    expected = torch.empty(8 * values, dtype=dtype)
    dequantize(data, kind, expected)

    def run():
        out = torch.zeros(8 * values, dtype=dtype, device=DEVICE)
        dequantize(data, kind, out)
        return Download([out.float()], DEVICE)

    (read,) = thread.call(run).wait()
    assert torch.equal(torch.from_numpy(read), expected.float())
