"""Native attention agrees with the reference, and comes to the same bits in any batch and chunk."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.device.attention import AttentionBatch, TorchAttention
from drumline.device.kernels.native import Machine, find_kernels
from drumline.device.kernels.trial import tried
from drumline.device.kv import BlockTable, KvPool
from drumline.device.native_attention import NativeAttention, fits

from .conftest import ints

PAGE = 16
COLUMNS = 50
ROWS = 4


@pytest.fixture(scope="module", params=[1, 2])
def machine(request):
    found = find_kernels(tried)
    assert found.kernels is not None, found.why_none
    return Machine(found.kernels, request.param)


class Side:
    """A back end with a pool of its own, and a table of shuffled blocks."""

    def __init__(self, attention, heads, kv_heads, dim, dtype=torch.float32):
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        pool = KvPool(
            layers=1,
            blocks=ROWS * COLUMNS + 1,
            block_tokens=PAGE,
            kv_heads=kv_heads,
            head_dim=dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        self.attention = attention(pool)
        self.table = BlockTable(ROWS + 1, COLUMNS)
        blocks = np.random.default_rng(2).permutation(np.arange(1, ROWS * COLUMNS + 1))
        columns = np.arange(COLUMNS, dtype=np.int32)
        for row in range(1, ROWS + 1):
            mine = blocks[(row - 1) * COLUMNS : row * COLUMNS].astype(np.int32)
            self.table.patch(np.full(COLUMNS, row, np.int32), columns, mine)

    def attend(self, rows, prefixes, parts, window=None):
        """Feed each row's part, `(query, key, value)`; returns what the queries read."""
        lengths = ints(*(len(part[0]) for part in parts))
        batch = AttentionBatch(
            self.table, ints(*rows), lengths, ints(*prefixes), self.attention.pool.shape
        )
        joined = [torch.cat(side).to(self.dtype) for side in zip(*parts, strict=True)]
        return self.attention(0, *joined, batch, window).float()


def sequence(length, heads, kv_heads, dim, seed):
    """Return queries, keys and values of `length` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads)]


def part(tokens, start, stop):
    return [side[start:stop] for side in tokens]


SHAPES = [(9, 3, 64), (4, 4, 16), (4, 2, 24), (8, 1, 128), (6, 2, 80)]


@pytest.mark.parametrize("window", [None, 20, 300])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_all_lengths_read_what_the_reference_reads(machine, shape, window):
    ours = Side(lambda pool: NativeAttention(pool, machine), *shape)
    theirs = Side(TorchAttention, *shape)
    prompts = [sequence(length, *shape, length) for length in (1, 33, 257, 700)]
    made, expected = [], []
    for side, got in ((ours, made), (theirs, expected)):
        got.append(side.attend([1, 2, 3, 4], [0] * 4, prompts, window))
        # An answer, chunks, and an answer behind a long prompt.
        more = [
            part(sequence(8, *shape, 90 + row), 0, n) for row, n in ((1, 1), (2, 5), (3, 8), (4, 1))
        ]
        got.append(side.attend([1, 2, 3, 4], [1, 33, 257, 700], more, window))
    for mine, other in zip(made, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-6)


def test_a_pool_of_bfloat16_is_read_as_it_holds(machine):
    shape = (9, 3, 64)
    ours = Side(lambda pool: NativeAttention(pool, machine), *shape, torch.bfloat16)
    exact = Side(TorchAttention, *shape)
    tokens = sequence(300, *shape, 1)
    rounded = [side.bfloat16().float() for side in tokens]
    mine, other = (side.attend([1], [0], [rounded]) for side in (ours, exact))
    # It computes in float32; what it returns is bfloat16.
    torch.testing.assert_close(mine, other.bfloat16().float(), rtol=1e-2, atol=1e-3)
    for kept, stored in zip(
        (ours.attention.pool.keys[0], ours.attention.pool.values[0]),
        (exact.attention.pool.keys[0], exact.attention.pool.values[0]),
        strict=True,
    ):
        assert torch.equal(kept.float(), stored)


LENGTHS = (530, 270, 40)


@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_token_reads_the_same_bits_in_any_chunk_and_company(machine, data):
    shape = (4, 2, 32)
    window = data.draw(st.sampled_from([None, 30, 260]), "window")
    prompts = [sequence(length, *shape, length) for length in LENGTHS]
    side = Side(lambda pool: NativeAttention(pool, machine), *shape)
    whole = [side.attend([i + 1], [0], [prompt], window) for i, prompt in enumerate(prompts)]
    fed, got = [0] * 3, [[], [], []]
    while any(done < length for done, length in zip(fed, LENGTHS, strict=True)):
        running = [i for i in range(3) if fed[i] < LENGTHS[i]]
        rows = data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
        sizes = [data.draw(st.sampled_from([1, 2, 9, 100, 300])) for _ in rows]
        parts = [
            part(prompts[i], fed[i], fed[i] + size) for i, size in zip(rows, sizes, strict=True)
        ]
        out = side.attend([i + 1 for i in rows], [fed[i] for i in rows], parts, window)
        for i, made in zip(rows, out.split([len(each[0]) for each in parts]), strict=True):
            got[i].append(made)
            fed[i] += len(made)
    for parts, expected in zip(got, whole, strict=True):
        assert torch.equal(torch.cat(parts), expected)


def test_what_is_no_number_is_no_neighbour_s(machine):
    shape = (4, 2, 16)
    side = Side(lambda pool: NativeAttention(pool, machine), *shape)
    prompts = [sequence(30, *shape, seed) for seed in (1, 2)]
    expected = side.attend([1, 2], [0, 0], prompts)
    prompts[0][1][3] = float("nan")
    made = side.attend([1, 2], [0, 0], prompts)
    assert torch.equal(made[30:], expected[30:])
    assert torch.equal(made[:3], expected[:3])
    assert made[3:30].isnan().all()


def test_heads_that_kernels_do_not_compute_are_told():
    assert fits(9, 3, 64)
    assert not fits(4, 2, 20)
    assert not fits(130, 1, 64)
