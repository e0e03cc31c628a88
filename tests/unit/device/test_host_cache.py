"""Blocks go to host memory and come back as they were, in the order that a plan relies on."""

import ctypes
import threading
import time

import msgspec
import numpy as np
import pytest
import torch

from drumline.contract.arena import ArenaTier
from drumline.contract.cache import BlockMoves, CacheAck, LoadBack, Restore, Snapshot, WriteBack
from drumline.contract.plan import Bound, PageZeroes, TablePatch
from drumline.contract.ports import LogprobPlan
from drumline.contract.request import Sampling
from drumline.core.config import (
    CacheConfig,
    Config,
    DeviceChecks,
    Dtype,
    ModelConfig,
    ScheduleConfig,
)
from drumline.core.errors import ConfigError, InvariantError
from drumline.device.budget import host_sizes
from drumline.device.forward_thread import ForwardThread
from drumline.device.guards import ForwardChecks
from drumline.device.host_cache import HostSizes
from drumline.device.host_pool import HostPool
from drumline.device.kv import KvPool
from drumline.device.kv_form import KvForm

from .conftest import Rig, ints
from .emulated_cuda import DEVICE

RANDOM = np.random.default_rng(4)
PROMPT = RANDOM.integers(0, 320, 50).tolist()
OTHER = RANDOM.integers(0, 320, 30).tolist()
MIB = 1 << 20


BFLOAT16 = KvForm(torch.bfloat16)
FORMS = [
    KvForm(torch.float32),
    BFLOAT16,
    KvForm(torch.bfloat16, lines=True),
    KvForm(torch.int8),
    KvForm(torch.int8, lines=True),
]


def kv_pool(blocks=40, form=BFLOAT16, **changes):
    pool = KvPool(
        **{
            "layers": 3,
            "blocks": blocks,
            "block_tokens": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "form": form,
            "device": torch.device("cpu"),
            **changes,
        }
    )
    generator = torch.Generator().manual_seed(blocks)
    slots = (torch.arange(blocks)[:, None] * pool.shape.rows + torch.arange(4)).flatten()
    size = (2, len(slots), changes.get("kv_heads", 2), changes.get("head_dim", 8))
    for layer in range(3):
        pool.store(layer, slots, *torch.randn(size, generator=generator))
    return pool


def moves(sources, targets):
    return BlockMoves(0, ints(*sources), ints(*targets))


def contents(pool, block):
    return getattr(pool.bytes, "near", pool.bytes)[block].clone()


def same(left, right):
    return torch.equal(left, right)


def store(host, kv, *moved, threads=2):
    for task in host.stores(kv, moved, threads):
        task()


def load(host, kv, *moved, threads=2, step_fields=6):
    for step in host.loads(kv, moved, threads, step_fields):
        for task in step:
            task()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_blocks_come_back_as_they_were_whatever_neighbours_they_had(form):
    kv = kv_pool(form=form)
    host = HostPool(kv, 30, ArenaTier.HOST)
    held = {}
    for _ in range(20):
        count = int(RANDOM.integers(1, 9))
        # Neighbours on both sides, on one, on none.
        sources = RANDOM.permutation(np.arange(1, 40))[:count]
        targets = RANDOM.permutation(np.arange(1, 31))[:count]
        if RANDOM.random() < 0.5:
            sources = np.arange(count) + RANDOM.integers(1, 40 - count)
        if RANDOM.random() < 0.5:
            targets = np.arange(count) + RANDOM.integers(1, 31 - count)
        store(host, kv, moves(sources, targets))
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            held[target] = contents(kv, source)
        blocks = RANDOM.permutation(sorted(held))[:4].tolist()
        places = RANDOM.permutation(np.arange(1, 40))[: len(blocks)].tolist()
        load(host, kv, moves(blocks, places), step_fields=int(RANDOM.integers(1, 8)))
        for block, place in zip(blocks, places, strict=True):
            assert same(contents(kv, place), held[block])


def test_a_host_block_lies_in_one_piece_layer_by_layer_keys_before_values():
    kv = kv_pool()
    host = HostPool(kv, 4, ArenaTier.HOST)
    store(host, kv, moves([7], [3]))
    arena = host.arena
    assert arena.blocks == 4
    assert arena.layout.block_bytes == 3 * 2 * 4 * 2 * 8 * 2
    raw = ctypes.string_at(arena.address, arena.size)
    block = raw[2 * arena.layout.block_bytes :][: arena.layout.block_bytes]
    expected = [part for pair in zip(kv.keys, kv.values, strict=True) for part in pair]
    assert block == b"".join(
        part.numbers[7].contiguous().view(torch.uint8).numpy().tobytes() for part in expected
    )


def test_a_block_that_holds_nothing_or_lies_outside_is_refused():
    kv = kv_pool()
    host = HostPool(kv, 4, ArenaTier.HOST)
    store(host, kv, moves([1], [2]))
    with pytest.raises(InvariantError, match="host block 3 holds no page of layout 'tokens"):
        load(host, kv, moves([2, 3], [5, 6]))
    with pytest.raises(InvariantError, match="blocks 1 to 4, not 0 to 5"):
        store(host, kv, moves([1, 2], [0, 5]))


def test_pages_of_another_layout_are_foreign_and_are_not_read():
    kv, other = kv_pool(), kv_pool(form=KvForm(torch.float16))
    bfloat, half = kv.layout, other.layout
    assert bfloat.block_bytes == half.block_bytes
    assert bfloat.tag != half.tag
    host = HostPool(kv, 4, ArenaTier.HOST)
    store(host, kv, moves([1], [2]))
    before = contents(other, 5)
    with pytest.raises(InvariantError, match=r"host block 2 holds no page of layout .*float16"):
        load(host, other, moves([2], [5]))
    assert same(contents(other, 5), before)
    # The tag travels with the page: what the other back end stored is the other's.
    store(host, other, moves([1], [2]))
    with pytest.raises(InvariantError, match=r"host block 2 holds no page of layout .*bfloat16"):
        load(host, kv, moves([2], [5]))
    assert kv_pool(kv_heads=4, head_dim=4).layout.tag != bfloat.tag
    assert len({kv_pool(form=form).layout.tag for form in FORMS}) == len(FORMS)


# -- within a plan ----------------------------------------------------------------


@pytest.fixture
def rig(checkpoint):
    """Return a running device with every tier; stopped at teardown."""
    made = []

    def of(thread=None, device=None, **changes):
        cache = {
            "max_total_tokens": 16 * 63,
            "kvstore": True,
            "retraction_snapshot_max_requests": 2,
            **changes,
        }
        made.append(
            Rig(
                Config(
                    model=ModelConfig(
                        model=str(checkpoint("llama")[1]), device="cpu", dtype=Dtype.FLOAT32
                    ),
                    cache=CacheConfig(**cache),
                    schedule=ScheduleConfig(max_num_seqs=8),
                ),
                thread,
                device,
            )
        )
        return made[-1]

    yield of
    for each in made:
        each.plane.shutdown()


@pytest.fixture(params=["cpu", "cuda"])
def anywhere(request, rig):
    """Return what makes such a device, or one that is an emulated GPU."""
    made = []
    emulation = request.getfixturevalue("emulation") if request.param == "cuda" else None

    def of():
        if emulation is None:
            return rig()
        thread = ForwardThread()
        emulation(thread)
        made.append(rig(thread, DEVICE))
        thread.serve_checked(ForwardChecks(DeviceChecks.ERROR, DEVICE))
        return made[-1]

    yield of
    for device in made:
        device.plane.shutdown()


def patch(row, blocks):
    columns = np.arange(len(blocks), dtype=np.int32)
    return TablePatch(0, np.full(len(blocks), row, np.int32), columns, ints(*blocks))


def settled(device, count=1):
    """Return the acknowledgments of `count` operations, once everything queued has run."""
    device.thread.call(lambda: None)
    acks = []
    deadline = time.monotonic() + 20
    while len(acks) < count and time.monotonic() < deadline:
        acks += device.plane.poll_cache_acks()
    return sorted(acks, key=lambda ack: ack.op_id)


def follow(device, row, count):
    """Return tokens and log probabilities of `count` decodes."""
    wanted = LogprobPlan(ints(0), ints(0))
    results = [device.run(device.plan(decodes=[row]), wanted) for _ in range(count)]
    return [(int(r.tokens[0]), r.logprobs[0].sampled[0]) for r in results]


SAMPLINGS = [
    Sampling(top_k=1),
    Sampling(seed=9, temperature=1.3, frequency_penalty=0.7, repetition_penalty=1.2),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded, penalized"])
def test_a_suspended_request_goes_on_elsewhere_as_if_nothing_happened(anywhere, sampling):
    device = anywhere()
    admission = {"sampling": sampling, "prompt_ids": ints(*PROMPT)}
    parts = device.start(1, "alone", PROMPT, blocks=range(1, 9), **admission)
    expected = [device.run(device.plan([(1, 100)], **parts)).tokens.item()]
    expected += follow(device, 1, 9)
    device.plane.release(["alone"])

    parts = device.start(1, "a", PROMPT, blocks=range(11, 19), **admission)
    said = [device.run(device.plan([(1, 100)], **parts)).tokens.item()]
    said += follow(device, 1, 4)
    place = device.rows.pop(1)
    # Two full pages to the host tier, what is behind them to its image; in the same plan, its
    # row and its blocks are another request's, blanked and written by this plan's forward.
    ops = (
        WriteBack(0, (moves([11, 12], [5, 9]),), pinned=False),
        Snapshot(1, "a", 1, 2, (moves([13, 14], [1, 2]),)),
    )
    parts = device.start(1, "b", OTHER, blocks=[14, 11, 13, 12], sampling=Sampling(seed=3))
    parts["zeroes"] = (PageZeroes(0, ints(14, 11, 13, 12)),)
    device.run(device.plan([(1, 100)], cache_ops=ops, **parts))
    assert settled(device, 2) == [CacheAck(0), CacheAck(1)]
    assert device.plane.poll_cache_acks() == []
    follow(device, 1, 3)
    # It comes back on another row and in other blocks, beside the one that displaced it.
    device.rows[2] = place
    back = Restore(2, "a", 2, 2, (moves([5, 9], [30, 20]),), (moves([1, 2], [21, 40]),))
    device.run(
        device.plan(
            decodes=[1],
            cache_ops=(back,),
            bound=(Bound(2, 5, "a"),),
            patches=(patch(2, [30, 20, 21, 40]),),
        )
    )
    assert settled(device) == [CacheAck(2)]
    said += follow(device, 2, 5)
    assert [token for token, _ in said[1:]] == [token for token, _ in expected[1:]]
    assert said[0] == expected[0]
    assert [p for _, p in said[1:]] == pytest.approx([p for _, p in expected[1:]], abs=1e-6)


def test_a_load_lands_on_blanked_pages_and_the_plan_s_forward_reads_it(anywhere):
    device = anywhere()
    expected = device.generate(1, "a", PROMPT, 6, blocks=range(1, 9))
    stored = WriteBack(0, (moves([1, 2, 3], [3, 1, 2]),), pinned=True)
    device.execute(device.plan(cache_ops=(stored,)))
    assert settled(device) == [CacheAck(0)]
    device.execute(device.plan(zeroes=(PageZeroes(0, ints(1, 2, 3, 4)),)))
    parts = device.start(2, "b", PROMPT, blocks=[24, 22, 23, 21, 25])
    device.rows[2][1] = 48
    loaded = LoadBack(1, (moves([3, 1, 2], [24, 22, 23]),))
    blanked = (PageZeroes(0, ints(21, 22, 23, 24, 25)),)
    first = device.run(device.plan([(2, 100)], cache_ops=(loaded,), zeroes=blanked, **parts))
    assert settled(device) == [CacheAck(1)]
    rest = [device.run(device.plan(decodes=[2])).tokens.item() for _ in range(5)]
    assert [first.tokens.item(), *rest] == expected


@pytest.mark.parametrize("pinned", [True, False])
def test_a_store_reads_what_its_blocks_held_before_the_plan_unless_they_are_pinned(
    anywhere, pinned
):
    device = anywhere()
    device.generate(1, "a", PROMPT, 2, blocks=range(1, 9))
    pool = device.built.handle._pool
    before, blank = contents(pool, 1), torch.zeros_like(contents(pool, 1))
    stored = WriteBack(0, (moves([1], [1]),), pinned=pinned)
    device.execute(
        device.plan(
            cache_ops=(stored,),
            copies=(BlockMoves(0, ints(1), ints(40)),),
            zeroes=(PageZeroes(0, ints(1)),),
        )
    )
    assert settled(device) == [CacheAck(0)]
    device.execute(device.plan(cache_ops=(LoadBack(1, (moves([1], [41]),)),)))
    assert settled(device) == [CacheAck(1)]
    assert same(contents(pool, 40), before)
    # The scheduler never gives pinned blocks away; that this plan does shows when it is read.
    assert same(contents(pool, 41), blank if pinned else before)


def test_a_pinned_store_keeps_no_forward_from_its_result(rig):
    device = rig()
    parts = device.start(1, "a", PROMPT, blocks=range(1, 9))
    device.run(device.plan([(1, 100)], **parts))
    go = threading.Event()
    cache = device.built.handle._cache
    store = cache.store_pinned
    device.built.handle._cache = Slow(cache, store, go)
    stored = WriteBack(0, (moves([1], [1]),), pinned=True)
    device.run(device.plan(decodes=[1], cache_ops=(stored,)))
    assert device.plane.poll_cache_acks() == []
    go.set()
    assert settled(device) == [CacheAck(0)]


class Slow:
    """A host cache whose pinned stores wait for `go`."""

    def __init__(self, cache, store, go):
        self.cache, self.store, self.go = cache, store, go

    def __getattr__(self, name):
        return getattr(self.cache, name)

    def store_pinned(self, ops):
        assert self.go.wait(20)
        self.store(ops)


@pytest.mark.parametrize(
    ("op", "said"),
    [
        (WriteBack(0, (moves([1], [1]),), pinned=True), "WriteBack 0 needs a pool"),
        (Snapshot(7, "a", 1, 1, (moves([1], [1]),)), "Snapshot 7 needs a pool"),
        (Snapshot(7, "a", 1, 1, ()), "there are 0 slots for suspended requests, not 1"),
    ],
)
def test_an_operation_on_a_tier_that_is_not_there_stops_the_plane(rig, op, said):
    device = rig(kvstore=False, retraction_snapshot_max_requests=0)
    device.execute(device.plan(cache_ops=(op,)))
    with pytest.raises(InvariantError, match=said):
        device.thread.call(lambda: None)
    with pytest.raises(InvariantError, match=said):
        device.plane.poll_cache_acks()


# -- sizes ------------------------------------------------------------------------


def sized(left=100 * MIB, pages=33, page_bytes=MIB, seqs=8, **cache):
    config = Config(
        cache=msgspec.convert(cache, CacheConfig), schedule=ScheduleConfig(max_num_seqs=seqs)
    )
    return host_sizes(config, pages, page_bytes, left)


def test_without_a_flag_suspended_requests_may_take_as_much_as_the_pool_gave_away():
    assert sized(left=1000 * MIB) == HostSizes(1, 33, 8)


def test_the_default_takes_no_more_than_a_quarter_of_what_is_left():
    assert sized(left=100 * MIB) == HostSizes(1, 26, 8)
    assert sized(left=3 * MIB) == sized(left=-5) == HostSizes(1, 1, 0)


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({"kvstore": True}, HostSizes(65, 10, 8)),
        ({"kvstore": True, "kvstore_ratio": 0.5}, HostSizes(17, 22, 8)),
        ({"kvstore": True, "kvstore_size": "5MiB"}, HostSizes(6, 24, 8)),
        ({"kvstore": True, "kvstore_size": "0.05"}, HostSizes(48, 14, 8)),
        ({"retraction_snapshot_host_gb": 0.02}, HostSizes(1, 20, 8)),
        ({"retraction_snapshot_host_gb": 0}, HostSizes()),
        ({"retraction_snapshot_max_requests": 1}, HostSizes(1, 26, 1)),
        ({"retraction_snapshot_max_requests": 0}, HostSizes()),
    ],
)
def test_flags_size_the_tiers(asked, sizes):
    assert sized(**asked) == sizes


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"kvstore": True, "kvstore_size": "200MiB"},
            "--kvstore-size: asks for 200 MiB of host memory; .* 100 MiB are left; "
            "lower it to 100MiB or less",
        ),
        (
            {"kvstore": True, "kvstore_ratio": 4.0},
            "--kvstore-ratio: asks for 128 MiB.*lower it to 3.12 or less",
        ),
        (
            {"kvstore": True, "kvstore_size": "1000 KiB"},
            "--kvstore-size: 1024000 bytes hold no page, which takes 1048576 bytes",
        ),
        (
            {"retraction_snapshot_host_gb": 0.2},
            "--retraction-snapshot-host-gb: asks for 190 MiB.*lower it to 0.1 or less",
        ),
        ({"retraction_snapshot_host_gb": 0.001}, "--retraction-snapshot-host-gb: 1000000 bytes"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(asked, said):
    with pytest.raises(ConfigError, match=said):
        sized(**asked)
