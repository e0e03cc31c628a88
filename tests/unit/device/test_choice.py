"""Which device a rank takes, and what is refused or settled because of it."""

import pytest
import torch
from msgspec.structs import replace

from drumline.core.config import (
    CacheConfig,
    Config,
    Dtype,
    KvCacheDtype,
    ModelConfig,
    ParallelConfig,
    Quantization,
)
from drumline.core.errors import ConfigError
from drumline.core.model_files import find_model
from drumline.device import budget
from drumline.device.backends import chosen
from drumline.device.budget import budget_of, pool_pages
from drumline.device.choice import Room, device_of
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.models.config import QUANTIZED

CUDA = torch.device("cuda", 0)
GIB = 1 << 30


@pytest.fixture
def gpus(monkeypatch):
    def of(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return of


@pytest.mark.parametrize(
    ("asked", "count", "rank", "ranks", "expected"),
    [
        ("auto", 0, 0, 2, "cpu"),
        ("auto", 2, 1, 2, "cuda:1"),
        ("cpu", 2, 1, 2, "cpu"),
        ("cuda", 1, 0, 1, "cuda:0"),
        ("cuda:3", 8, 2, 4, "cuda:5"),
    ],
)
def test_each_rank_of_a_machine_takes_a_gpu_of_its_own(gpus, asked, count, rank, ranks, expected):
    gpus(count)
    assert device_of(asked, rank, ranks) == torch.device(expected)


@pytest.mark.parametrize(
    ("asked", "count", "ranks", "told"),
    [
        ("cuda", 0, 1, "sees no GPU"),
        ("auto", 1, 2, "2 ranks of this machine take a GPU each, and there are 1"),
        ("cuda:1", 2, 2, "2 ranks of this machine take a GPU each from 1 on, and there are 2"),
    ],
)
def test_gpus_that_are_not_there_are_refused_with_how_many_there_are(
    gpus, asked, count, ranks, told
):
    gpus(count)
    with pytest.raises(ConfigError, match=told) as caught:
        device_of(asked, 0, ranks)
    assert caught.value.setting == "--device"


@pytest.mark.parametrize(
    ("stored", "asked", "dtype"),
    [
        ("float16", Dtype.AUTO, torch.bfloat16),
        ("bfloat16", Dtype.AUTO, torch.bfloat16),
        (QUANTIZED, Dtype.AUTO, torch.bfloat16),
        ("float32", Dtype.AUTO, torch.float32),
        (QUANTIZED, Dtype.FLOAT16, torch.float16),
    ],
)
def test_on_cuda_torch_computes_floats(checkpoint, stored, asked, dtype):
    how = chosen(ModelConfig(dtype=asked), model(checkpoint, stored), 1, device=CUDA)
    assert (how.dtype, how.kv_form.dtype, how.kv_form.lines) == (dtype, dtype, False)
    assert (how.backend.name, how.backend.packs, how.backend.one_call) == ("torch", False, False)
    assert how.machine is None
    kept = chosen(ModelConfig(), model(checkpoint, stored), 1, KvCacheDtype.INT8, CUDA)
    assert kept.kv_form.dtype == torch.int8


@pytest.mark.parametrize(
    ("how", "flag"),
    [
        ({"deterministic": True}, "--deterministic"),
        ({"quantization": Quantization.GGUF}, "--quantization"),
    ],
)
def test_what_cuda_has_not_is_refused_by_its_flag(checkpoint, how, flag):
    with pytest.raises(ConfigError) as caught:
        chosen(ModelConfig(**how), model(checkpoint, "bfloat16"), 1, device=CUDA)
    assert caught.value.setting == flag


def model(checkpoint, stored):
    found = open_checkpoint(find_model(str(checkpoint("llama")[1]))).config
    return replace(found, stored_dtype=stored)


def test_the_pool_on_cuda_takes_what_its_share_of_all_memory_leaves(monkeypatch):
    monkeypatch.setattr(budget, "room_of", lambda _: Room(100 * GIB, 90 * GIB))
    made = budget_of(Config(), 1 << 20, 16 * GIB, int, CUDA)
    assert made.pages == (90 - 10 - 16 - 2) * 1024
    sized = Config(cache=CacheConfig(gpu_memory_utilization=0.5))
    assert budget_of(sized, 1 << 20, 16 * GIB, int, CUDA).pages == (50 - 10 - 16 - 2) * 1024
    sized = Config(
        cache=CacheConfig(kv_cache_size="4GiB"), parallel=ParallelConfig(tensor_parallel_size=8)
    )
    assert budget_of(sized, 1 << 20, 16 * GIB, int, CUDA).pages == 4 * 1024


def test_a_share_that_others_have_taken_already_is_refused_with_one_that_will_do():
    room = Room(100 * GIB, 40 * GIB)
    with pytest.raises(ConfigError, match=r"raise it to 0\.69 or more"):
        pool_pages(CacheConfig(gpu_memory_utilization=0.5), 1 << 20, 8 * GIB, room)
    assert pool_pages(CacheConfig(gpu_memory_utilization=0.69), 1 << 20, 8 * GIB, room) > 2
