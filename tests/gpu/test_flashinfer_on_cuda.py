"""FlashInfer on a GPU reads what the reference reads, and nothing waits for its plans.

Where its kernels were never compiled, that takes minutes first.
"""

import itertools

import numpy as np
import pytest
import torch

from drumline.device.attention import AttentionBatch, TorchAttention
from drumline.device.flashinfer_attention import FlashInferAttention, HeadShape
from drumline.device.flashinfer_trial import find_flashinfer
from drumline.device.kv import BlockTable, KvPool
from drumline.device.kv_form import KvForm

PAGE, COLUMNS, ROWS, LAYERS = 16, 80, 40, 3
HEADS = [(9, 3, 64), (32, 8, 128)]
WINDOWS = [(None,) * 3, (100,) * 3, (None, 7, 300)]


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch.device("cuda", 0)


@pytest.fixture(params=HEADS, ids=str)
def shape(request, cuda):
    heads, kv_heads, dim = request.param
    return HeadShape(heads, kv_heads, dim, frozenset({None, 7, 100, 300}), torch.bfloat16)


@pytest.fixture
def library(shape, cuda):
    found = find_flashinfer(shape, PAGE, shape.dtype, cuda)
    if found.why_none.startswith("is not installed"):
        pytest.skip(f"FlashInfer {found.why_none}")
    assert not found.why_none
    return found.library


class Side:
    """A back end with a pool of its own."""

    def __init__(self, shape, device, library=None):
        self.shape, self.device = shape, device
        self.pool = KvPool(
            layers=LAYERS,
            blocks=ROWS * COLUMNS + 1,
            block_tokens=PAGE,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            form=KvForm(shape.dtype),
            device=device,
        )
        self.attention = (
            TorchAttention(self.pool)
            if library is None
            else FlashInferAttention(library, self.pool, shape)
        )
        self.table = BlockTable(ROWS + 1, COLUMNS)
        blocks = np.random.default_rng(2).permutation(np.arange(1, ROWS * COLUMNS + 1))
        for row in range(1, ROWS + 1):
            mine = blocks[(row - 1) * COLUMNS : row * COLUMNS].astype(np.int32)
            self.table.patch(np.full(COLUMNS, row, np.int32), np.arange(COLUMNS), mine)

    def batch(self, rows, prefixes, lengths):
        rows, lengths, prefixes = (np.array(each, np.int32) for each in (rows, lengths, prefixes))
        return AttentionBatch(self.table, rows, lengths, prefixes, self.pool.shape, self.device)

    def attend(self, batch, seed, windows):
        tokens, shape = int(batch.lengths.sum()), self.shape
        random = torch.Generator(self.device).manual_seed(seed)
        heads = [
            torch.randn(
                tokens,
                each,
                shape.head_dim,
                generator=random,
                device=self.device,
                dtype=shape.dtype,
            )
            for each in (shape.heads, shape.kv_heads, shape.kv_heads)
        ]
        return [
            self.attention(layer, *heads, batch, window) for layer, window in enumerate(windows)
        ]


def rounds(seed):
    """Yield batches of all kinds, as they would follow each other."""
    random = np.random.default_rng(seed)
    ends = dict.fromkeys(range(1, ROWS + 1), 0)
    for _ in range(12):
        rows = random.permutation(ROWS)[: random.integers(1, ROWS)] + 1
        new = [row for row in rows if not ends[row]][:6]
        chunked = [row for row in rows if ends[row]][:3]
        decoding = [row for row in rows if ends[row]][3:]
        lengths = [
            *(int(random.integers(1, 400)) for _ in new),
            *(int(random.integers(1, 40)) for _ in chunked),
            *(1 for _ in decoding),
        ]
        fed = [*new, *chunked, *decoding]
        yield fed, [ends[row] for row in fed], lengths
        for row, length in zip(fed, lengths, strict=True):
            ends[row] += length


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@torch.inference_mode()
def test_ragged_batches_read_what_the_reference_reads(shape, library, cuda, windows):
    ours, theirs = Side(shape, cuda, library), Side(shape, cuda)
    for number, where in enumerate(rounds(3)):
        made, expected = (
            side.attend(side.batch(*where), number, windows) for side in (ours, theirs)
        )
        for mine, other in zip(made, expected, strict=True):
            torch.testing.assert_close(mine.float(), other.float(), rtol=0, atol=2e-2)
    assert torch.equal(ours.pool.bytes, theirs.pool.bytes)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@torch.inference_mode()
def test_plans_that_wait_behind_others_are_not_written_over(shape, library, cuda, windows):
    calm, hurried = Side(shape, cuda, library), Side(shape, cuda, library)
    batches = list(rounds(5))
    expected = []
    for number, where in enumerate(batches):
        expected.append(calm.attend(calm.batch(*where), number, windows))
        torch.cuda.synchronize()
    # The device does nothing until all is planned.
    torch.cuda._sleep(2_000_000_000)
    made = [
        hurried.attend(hurried.batch(*where), number, windows)
        for number, where in enumerate(batches)
    ]
    for mine, other in zip(itertools.chain(*made), itertools.chain(*expected), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


@torch.inference_mode()
def test_no_forward_waits_for_the_device(shape, library, cuda):
    side = Side(shape, cuda, library)
    side.attention.reserve(2, COLUMNS)
    windows = WINDOWS[2]
    for number, where in enumerate(rounds(7)):
        side.attend(side.batch(*where), number, windows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, where in enumerate(rounds(7)):
            side.attend(side.batch(*where), number, windows)
            decodes = side.batch([1, 2], [5, 9], [1, 1])
            side.attention.prepare(decodes)
            side.attend(decodes, number, windows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
