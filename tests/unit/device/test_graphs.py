"""Decodes that are padded and repeated come to what an ordinary forward makes of them."""

import itertools

import numpy as np
import pytest
import torch

from drumline.core.errors import InvariantError
from drumline.device.graphs import DecodeGraphs, sizes_up_to
from drumline.device.kv import BlockShape, BlockTable

from .conftest import ints
from .test_models import REFERENCE, Loaded

SIZES = (1, 2, 4)


def again(forward):
    """Record nothing, and call the function again: on a CPU that is what a recording does."""
    return forward


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (80, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80)),
    ],
)
def test_sizes_begin_with_powers_of_two_and_end_with_the_largest_batch(most, sizes):
    assert sizes_up_to(most) == sizes


@pytest.mark.parametrize("most", [160, 256, 300, 1000])
def test_steps_between_sizes_stay_small_beside_them(most):
    sizes = sizes_up_to(most)
    assert sizes[-1] == most
    assert all(a < b <= max(2 * a, 8) and b - a <= 32 for a, b in itertools.pairwise(sizes))
    assert all((b - a) / b <= 1 / 4 for a, b in itertools.pairwise(sizes) if a >= 24)


class Graphed(Loaded):
    """A decoder whose decodes are repeated, and that notes how."""

    def __init__(self, directory, sizes=SIZES):
        super().__init__(directory, backend=REFERENCE)
        self.prepared = []
        self.table = BlockTable(6, 8)
        blocks = np.random.default_rng(1).permutation(np.arange(1, 32)).astype(np.int32)
        for row in range(1, 6):
            self.table.patch(np.full(6, row, np.int32), np.arange(6), blocks[6 * row - 6 :][:6])
        width = self.config.hidden_size
        self.read = set()
        self.graphs = DecodeGraphs(
            sizes,
            torch.zeros(sizes[-1], dtype=torch.int64),
            torch.zeros(sizes[-1], width),
            self.table,
            self.shape,
            lambda batch: self.prepared.append(len(batch.lengths)),
            lambda: again,
        )
        self.record()

    @torch.inference_mode()
    def record(self):
        def forward(fed, batch):
            self.read.add((len(fed), *(x.data_ptr() for x in (fed, batch.positions, batch.slots))))
            return self.decoder.hidden(fed, batch, self.attention)

        self.graphs.record(forward)

    @torch.inference_mode()
    def repeated(self, rows, prefixes, ids):
        """Return the logits of decodes by a recording."""
        fed = torch.tensor(ids)
        hidden = self.graphs.hidden(fed, ints(*rows), ints(*prefixes))
        return self.decoder.logits(hidden)

    def memory(self):
        return self.attention.pool.bytes.clone()


@pytest.fixture
def pair(checkpoint):
    """Return a function: family to two decoders that have read the same prompts."""

    def of(family):
        _, directory = checkpoint(family)
        both = Graphed(directory), Graphed(directory)
        for each in both:
            for row, length in PROMPTS.items():
                prompt = np.random.default_rng(row).integers(0, 320, length).astype(np.int32)
                each.feed([row], [0], [prompt])
        return both

    return of


PROMPTS = {1: 3, 2: 40, 3: 16, 4: 31, 5: 60}


@pytest.mark.parametrize("family", ["llama", "mistral, window", "qwen2, some windows", "qwen3"])
def test_padded_decodes_come_to_the_logits_of_an_ordinary_forward(pair, family):
    repeated, eager = pair(family)
    ends = dict(PROMPTS)
    random = np.random.default_rng(4)
    for step in range(12):
        rows = random.permutation(5)[: 1 + step % 4] + 1
        ids = random.integers(0, 320, len(rows))
        prefixes = [ends[row] for row in rows]
        got = repeated.repeated(rows, prefixes, ids)
        expected = eager.feed(rows, prefixes, [ints(each) for each in ids])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        for row in rows:
            ends[row] += 1
    # Whatever they were fed, they read it in the same places.
    assert len(repeated.read) == len(SIZES)


def test_padding_writes_to_the_null_block_alone(pair):
    repeated, eager = pair("llama")
    before = repeated.memory()
    repeated.repeated([2, 5, 1], [40, 60, 3], [7, 8, 9])
    changed = (repeated.memory() != before).flatten(1).any(1).nonzero().flatten().tolist()
    own = [int(repeated.table.gather(ints(row), 6)[0, end // 16]) for row, end in PROMPTS.items()]
    assert set(changed) == {0, own[1], own[4], own[0]}
    eager.feed([2, 5, 1], [40, 60, 3], [ints(7), ints(8), ints(9)])
    torch.testing.assert_close(
        repeated.memory()[1:].view(torch.float32), eager.memory()[1:].view(torch.float32)
    )


def test_recording_writes_to_the_null_block_alone(pair):
    repeated, _ = pair("llama")
    before = repeated.memory()
    repeated.record()
    assert torch.equal(repeated.memory()[1:], before[1:])


def test_what_a_row_left_behind_does_not_reach_the_padding(pair):
    repeated, _ = pair("llama")
    # Ids behind those that are fed would be none.
    repeated.repeated([1, 2, 3, 4], [3, 40, 16, 31], [300, 301, 302, 303])
    repeated.repeated([1, 2, 3], [4, 41, 17], [1, 2, 3])
    assert repeated.graphs._fed.tolist() == [1, 2, 3, 0]


def test_what_kernels_read_is_prepared_before_each_repetition(pair):
    repeated, _ = pair("llama")
    assert repeated.prepared == [4, 2, 1]
    repeated.repeated([1], [3], [1])
    repeated.repeated([1, 2, 3], [4, 40, 16], [1, 2, 3])
    assert repeated.prepared[3:] == [1, 4]


def test_more_decodes_than_were_recorded_are_refused(pair):
    repeated, _ = pair("llama")
    assert repeated.graphs.holds(4)
    assert not repeated.graphs.holds(5)
    with pytest.raises(InvariantError, match="no forward of 5 decodes"):
        repeated.repeated([1, 2, 3, 4, 5], [3, 40, 16, 31, 60], [1, 2, 3, 4, 5])


def test_a_recording_that_was_dropped_is_made_anew_of_other_weights(pair, checkpoint):
    repeated, eager = pair("llama")
    repeated.graphs.drop()
    assert not repeated.graphs.holds(1)
    with pytest.raises(InvariantError, match="no forward of 1 decodes"):
        repeated.repeated([1], [3], [7])
    other = Loaded(checkpoint("llama, biased")[1]).decoder
    repeated.decoder = eager.decoder = other
    repeated.record()
    expected = eager.feed([1], [3], [ints(7)])
    torch.testing.assert_close(repeated.repeated([1], [3], [7]), expected, rtol=1e-5, atol=1e-5)


def test_each_set_of_recordings_has_a_recorder_of_its_own():
    """The memory of graphs that are gone cannot be taken up again."""
    made = []

    def recorder():
        made.append([])

        def record(forward):
            made[-1].append(forward)
            return forward

        return record

    graphs = DecodeGraphs(
        SIZES,
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(4, 2),
        BlockTable(2, 2),
        BlockShape(16, 16),
        lambda batch: None,
        recorder,
    )
    for _ in range(2):
        graphs.record(lambda fed, batch: torch.zeros(len(fed), 2))
    assert [len(each) for each in made] == [3, 3]
