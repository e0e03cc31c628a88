"""A model in parts computes what it computes whole: ranks are threads that meet over gloo."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from torch import distributed

from drumline.core.config import CacheConfig, Config
from drumline.core.errors import ConfigError, DrumlineError, PeerError
from drumline.core.model_files import find_model
from drumline.device import budget
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.models.shard import most_kv_heads, shard_of
from drumline.device.parallel import LinkedGroup, dial_store, open_store

from .conftest import FAMILIES
from .test_models import Loaded, assert_close

PROMPT = np.random.default_rng(3).integers(0, 320, 40).astype(np.int32)


def groups(pool, size):
    """Return the members of a group, each to be used on a thread of its own."""
    store = distributed.HashStore()
    return list(
        pool.map(lambda index: LinkedGroup(store, index, size, host="127.0.0.1"), range(size))
    )


def test_a_store_listens_on_the_address_it_was_given_and_on_no_other():
    store = open_store("127.0.0.1")
    met = dial_store("127.0.0.1", store.port)
    met.set("here", "yes")
    assert store.get("here") == b"yes"
    listens = [
        link.laddr
        for link in psutil.Process().net_connections("tcp")
        if link.status == psutil.CONN_LISTEN and link.laddr.port == store.port
    ]
    assert [place.ip for place in listens] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("family", "size"),
    [*((family, 2) for family in FAMILIES), ("llama", 3), ("llama", 4), ("qwen3", 4)],
)
def test_ranks_that_share_a_model_return_its_logits_the_same_bits_on_each(checkpoint, family, size):
    _, directory = checkpoint(family)
    whole = Loaded(directory)
    expected = [
        whole.feed([1], [0], [PROMPT[:33]]),
        whole.feed([1, 2], [33, 0], [PROMPT[33:34], PROMPT[:9]]),
    ]

    def run(group):
        part = Loaded(directory, group)
        return [
            part.feed([1], [0], [PROMPT[:33]]),
            part.feed([1, 2], [33, 0], [PROMPT[33:34], PROMPT[:9]]),
        ]

    with ThreadPoolExecutor(size) as pool:
        got = list(pool.map(run, groups(pool, size)))
    for first, *others in zip(*got, strict=True):
        assert first.is_contiguous(), "kernels draw from rows where they lie"
        for other in others:
            assert torch.equal(first, other)
    for ours, theirs in zip(got[0], expected, strict=True):
        assert_close(ours, theirs)


def test_a_chunk_that_samples_nothing_needs_no_head(checkpoint):
    _, directory = checkpoint("llama")

    @torch.inference_mode()
    def run(group):
        part = Loaded(directory, group)
        batch = part.batch([1], [0], [PROMPT])
        ids = torch.from_numpy(PROMPT.astype(np.int64))
        nothing = torch.zeros(0, dtype=torch.int64)
        return part.decoder.forward(ids, batch, part.attention, nothing).shape

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, groups(pool, 2))) == [(0, 320), (0, 320)]


def test_the_smallest_pool_is_everybodys():
    with ThreadPoolExecutor(3) as pool:
        members = groups(pool, 3)
        assert list(pool.map(lambda one: one.least(7 - one.index), members)) == [5, 5, 5]


@pytest.mark.skipif(distributed.is_nccl_available(), reason="this torch has NCCL")
def test_ranks_on_cuda_say_that_they_need_nccl():
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size: ranks on cuda:1 .* NCCL"):
        LinkedGroup(distributed.HashStore(), 0, 2, host="127.0.0.1", device=torch.device("cuda:1"))


def test_ranks_on_a_device_that_nothing_links_are_refused_with_what_there_is():
    with pytest.raises(ConfigError, match="gloo for cpu, and NCCL for cuda"):
        LinkedGroup(distributed.HashStore(), 0, 2, host="127.0.0.1", device=torch.device("meta"))


def test_a_rank_without_memory_refuses_and_keeps_no_other_waiting(monkeypatch):
    mine = threading.local()
    monkeypatch.setattr(budget, "available_bytes", lambda: mine.bytes)
    config = Config(cache=CacheConfig(kv_cache_size="64MiB"))

    def run(group):
        mine.bytes = (1 << 30) if group.index != 1 else 300 << 20
        try:
            return budget.budget_of(config, 4096, 1 << 20, group.least)
        except DrumlineError as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(run, groups(pool, 3))
    assert isinstance(second, ConfigError)
    assert "300 MiB are available" in str(second)
    for other in (first, third):
        assert isinstance(other, PeerError)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_part_is_held_and_query_heads_stand_with_their_kv_head(checkpoint, family, size):
    config = open_checkpoint(find_model(str(checkpoint(family)[1]))).config
    shards = [shard_of(config, index, size) for index in range(size)]
    for part in ("heads", "inner", "vocab"):
        spans = [getattr(shard, part) for shard in shards]
        assert spans[0].start == 0
        assert spans[-1].stop == spans[-1].whole
        assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    shared = config.heads // config.kv_heads
    for shard in shards:
        heads = range(shard.heads.start, shard.heads.stop)
        assert heads
        assert {head // shared for head in heads} == set(
            range(shard.kv_heads.start, shard.kv_heads.stop)
        )
        assert len(shard.kv_heads) <= most_kv_heads(config, size)
        assert len(shard.heads) % len(shard.kv_heads) == 0


def test_more_ranks_than_heads_are_refused_with_both_numbers(checkpoint):
    config = open_checkpoint(find_model(str(checkpoint("llama")[1]))).config
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size: 5 ranks .* 4 attention heads"):
        shard_of(config, 0, 5)
