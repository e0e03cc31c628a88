"""Native attention agrees with the reference, and comes to the same bits in any batch and chunk."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.device.attention import AttentionBatch, TorchAttention
from drumline.device.kernels.compiling import VARIANTS
from drumline.device.kernels.native import Machine, find_kernels
from drumline.device.kernels.processor import instruction_sets
from drumline.device.kernels.trial import tried
from drumline.device.kv import BlockTable, KvPool
from drumline.device.kv_form import KvForm
from drumline.device.native_attention import NativeAttention, fits

from .conftest import ints

PAGE = 16
COLUMNS = 50
ROWS = 4


def fitting():
    return [each for each in VARIANTS if each.needs <= instruction_sets()]


@pytest.fixture(scope="module", params=["1 thread", "2 threads", "oldest processors'"])
def machine(request):
    variants = fitting()[-1:] if request.param.startswith("oldest") else VARIANTS
    found = find_kernels(tried, variants=variants)
    assert found.kernels is not None, found.why_none
    return Machine(found.kernels, 1 if request.param == "1 thread" else 2)


class Side:
    """A back end with a pool of its own, and a table of shuffled blocks."""

    def __init__(self, attention, heads, kv_heads, dim, kept=torch.float32):
        pool = KvPool(
            layers=1,
            blocks=ROWS * COLUMNS + 1,
            block_tokens=PAGE,
            kv_heads=kv_heads,
            head_dim=dim,
            form=KvForm(kept, lines=attention is not TorchAttention),
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
        joined = [torch.cat(side) for side in zip(*parts, strict=True)]
        return self.attention(0, *joined, batch, window)

    def kept(self):
        """Return all keys and values there are, as they are read."""
        pool, every = self.attention.pool, torch.arange(ROWS * COLUMNS + 1)
        return [side[0].read(every, torch.float32) for side in (pool.keys, pool.values)]


def sequence(length, heads, kv_heads, dim, seed):
    """Return queries, keys and values of `length` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads)]


def part(tokens, start, stop):
    return [side[start:stop] for side in tokens]


SHAPES = [(9, 3, 64), (4, 4, 16), (4, 2, 24), (8, 1, 128), (6, 2, 80)]


KEPT = [torch.float32, torch.bfloat16, torch.int8]


def close(machine, kept):
    """Return how near to the reference a value comes."""
    if kept is torch.int8:
        return 4e-4  # queries and weights meet integers as ones of 14 bits
    in_pairs = kept is torch.bfloat16 and machine.kernels.name == "avx512-bf16"
    return 2e-2 if in_pairs else 3e-6  # as bfloat16 themselves, there


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("window", [None, 20, 300])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_all_lengths_read_what_the_reference_reads(machine, shape, window, kept):
    ours = Side(partial(NativeAttention, machine=machine), *shape, kept)
    theirs = Side(TorchAttention, *shape, kept)
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
        torch.testing.assert_close(mine, other, rtol=0, atol=close(machine, kept))
    for mine, other in zip(ours.kept(), theirs.kept(), strict=True):
        assert torch.equal(mine, other)


def test_integers_are_nearest_to_what_they_stand_for(machine):
    shape = (4, 2, 32)
    side = Side(partial(NativeAttention, machine=machine), *shape, torch.int8)
    tokens = sequence(40, *shape, 6)
    # A vector of zeros, one whose step would be no normal number, and a large one.
    tokens[1][3], tokens[1][4], tokens[1][5] = 0, 1e-38, 1e30 * tokens[1][5]
    side.attend([1], [0], [tokens])
    blocks = torch.from_numpy(side.table.gather(ints(1), 3)[0].astype(np.int64))
    pool = side.attention.pool
    for exact, kept in zip(tokens[1:], (pool.keys[0], pool.values[0]), strict=True):
        read = kept.read(blocks, torch.float32)[: len(exact)]
        step = exact.abs().amax(-1, keepdim=True) / 127
        assert ((read - exact).abs() <= 0.5001 * step + 1e-37).all()


LENGTHS = (530, 270, 40)


@pytest.mark.parametrize("kept", KEPT, ids=str)
@given(data=st.data())
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_token_reads_the_same_bits_in_any_chunk_and_company(machine, kept, data):
    shape = (4, 2, 32)
    window = data.draw(st.sampled_from([None, 30, 260]), "window")
    prompts = [sequence(length, *shape, length) for length in LENGTHS]
    side = Side(partial(NativeAttention, machine=machine), *shape, kept)
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


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_what_is_no_number_is_no_neighbour_s(machine, kept, where, poison):
    shape = (4, 2, 16)
    side = Side(partial(NativeAttention, machine=machine), *shape, kept)
    prompts = [sequence(30, *shape, seed) for seed in (1, 2)]
    expected = side.attend([1, 2], [0, 0], prompts)
    prompts[0][where][3] = poison
    made = side.attend([1, 2], [0, 0], prompts)
    assert torch.equal(made[30:], expected[30:])
    assert torch.equal(made[:3], expected[:3])
    assert not made[3:30].isfinite().any()


@pytest.mark.parametrize("kept", [torch.float32, torch.int8], ids=str)
def test_processors_with_wider_registers_come_to_the_same_bits(kept):
    shape, made = (4, 2, 24), []
    prompts = [sequence(length, *shape, length) for length in (1, 300)]
    for variant in fitting():
        kernels = find_kernels(tried, variants=[variant]).kernels
        side = Side(partial(NativeAttention, machine=Machine(kernels, 2)), *shape, kept)
        made.append(side.attend([1, 2], [0, 0], prompts, 290))
    for other in made[1:]:
        assert torch.equal(other, made[0])


def test_heads_that_kernels_do_not_compute_are_told():
    assert fits(9, 3, 64)
    assert fits(2, 1, 1024)
    assert not fits(4, 2, 20)
    assert not fits(2, 1, 1032)
    assert not fits(130, 1, 64)
