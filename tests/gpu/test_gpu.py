"""Checks that need a GPU: `make gpu-check`, within five minutes.

Where there is no virtual environment but a Python with torch for CUDA, numpy, transformers,
safetensors, psutil, xxhash and pytest, `make gpu-check VENV=DIR` makes none and runs its python;
of what drumline's device needs such an image lacks `msgspec` alone, which PYTHONPATH may lead to.
Nothing is downloaded, and nothing is installed.

Small models of random weights are computed in float32 on both, and choose the same tokens
wherever the CPU prefers one by `MARGIN`.
"""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tests.unit.device.conftest import GREEDY, Rig, ints, small_config
from tests.unit.device.small_rank import SmallDevice, SmallRank
from torch import distributed

from drumline.contract.ports import LogprobPlan
from drumline.contract.regions import Region
from drumline.contract.request import Sampling
from drumline.core.config import CacheConfig, Config, DeviceChecks, Dtype, ModelConfig
from drumline.core.errors import ConfigError
from drumline.core.model_files import find_model
from drumline.device.choice import name_of
from drumline.device.forward_thread import ForwardThread
from drumline.device.guards import ForwardChecks, NoDevice
from drumline.device.memory import host_memory
from drumline.device.parallel import LinkedGroup

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MIB = 1 << 20
MARGIN = 1e-3
RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(0, 320, size).tolist() for size in (40, 3, 90, 17)]


@pytest.fixture
def rigs():
    """Return a function that makes a device which is checked as one that serves."""
    made = []

    def of(config, device):
        made.append(Rig(config, ForwardThread(), device))
        made[-1].thread.serve_checked(ForwardChecks(DeviceChecks.ERROR, device))
        return made[-1]

    yield of
    for each in made:
        each.plane.shutdown()


def told(device, prompt, count, sampling=GREEDY, row=1, chunk=16):
    """Return `count` tokens of a request with the log probabilities of the two likeliest."""
    rid = f"{row} {len(prompt)} {sampling}"
    parts = device.start(row, rid, prompt, sampling, prompt_ids=ints(*prompt))
    wanted, tickets = LogprobPlan(ints(0), ints(2)), []
    while device.rows[row][1] < len(prompt):
        tickets.append(device.execute(device.plan([(row, chunk)], **parts), wanted))
        parts = {}
    tickets += [device.execute(device.plan(decodes=[row]), wanted) for _ in range(count - 1)]
    results = [device.plane.complete(ticket) for ticket in tickets][-count:]
    device.plane.release([rid])
    return [
        (int(result.tokens[0]), result.logprobs[0].sampled[0], result.logprobs[0].top_values[0])
        for result in results
    ]


def same(mine, theirs):
    """Compare answers up to where the likeliest two are too close to tell; returns how far."""
    for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if other[2][0] - other[2][1] < MARGIN:
            return place
        assert one[0] == other[0], (place, one, other)
        assert one[1] == pytest.approx(other[1], abs=1e-3)
        assert one[2] == pytest.approx(other[2], abs=1e-3)
    return len(mine)


@pytest.mark.parametrize("family", ["llama, biased", "qwen2", "qwen3", "mistral, window"])
def test_greedy_answers_are_those_of_the_cpu(rigs, checkpoint, family):
    config = small_config(checkpoint(family)[1])
    gpu, cpu = rigs(config, CUDA), rigs(config, CPU)
    compared = 0
    for prompt in PROMPTS:
        gpu.next_block = cpu.next_block = 1
        compared += same(told(gpu, prompt, 20), told(cpu, prompt, 20))
    assert compared > 40


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.9, seed=1),
        Sampling(temperature=1.2, top_k=30, top_p=0.9, seed=2),
        Sampling(temperature=1.1, min_p=0.02, typical_p=0.9, seed=3),
        Sampling(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.3, seed=4),
    ],
)
def test_the_same_noise_draws_the_same_tokens(rigs, checkpoint, sampling):
    config = small_config(checkpoint("llama")[1])
    gpu, cpu = rigs(config, CUDA), rigs(config, CPU)
    drawn = []
    for device in (gpu, cpu):
        answers = []
        for prompt in PROMPTS:
            device.next_block = 1
            answers.append([token for token, _, _ in told(device, prompt, 20, sampling)])
        drawn.append(answers)
    # A draw may stand on a hair's breadth, and what follows it is another answer then.
    assert sum(mine != theirs for mine, theirs in zip(*drawn, strict=True)) <= 1


def test_the_embedded_model_says_what_it_does_on_the_cpu(rigs):
    try:
        find_model(None)
    except ConfigError as error:
        pytest.skip(f"the embedded model is not here: {error}")
    config = Config(
        model=ModelConfig(dtype=Dtype.FLOAT32, max_model_len=1024),
        cache=CacheConfig(max_total_tokens=1024),
    )
    prompt = RANDOM.integers(0, 40000, 60).tolist()
    answers = [told(rigs(config, device), prompt, 16, chunk=32) for device in (CUDA, CPU)]
    same(*answers)


def test_bfloat16_is_what_a_half_precision_checkpoint_is_computed_in(rigs, checkpoint, tmp_path):
    copy.deepcopy(checkpoint("llama")[0]).bfloat16().save_pretrained(tmp_path)
    device = rigs(small_config(tmp_path, dtype=Dtype.AUTO), CUDA)
    specs = device.built.specs
    assert (specs.model.dtype, specs.kv_dtype) == ("bfloat16", "bfloat16")
    assert specs.device == name_of(CUDA)
    assert all(np.isfinite(value) for _, value, _ in told(device, PROMPTS[0], 8))


def test_a_whole_rank_answers_with_forwards_in_flight(checkpoint):
    said = []
    for where in ("cuda", "cpu"):
        device = SmallDevice(checkpoint("llama")[1], model={"device": where}, kvstore=True)
        checks = ForwardChecks(DeviceChecks.ERROR, device.built.startup.device)
        try:
            rank = SmallRank(device, depth=1, chunk=48, retract=5)
            device.thread.serve_checked(checks)
            with NoDevice():
                for number in range(12):
                    rank.submit(f"r{number}", PROMPTS[number % 4], max_new_tokens=12)
                rank.finish()
            said.append([rank.answer(f"r{number}").ids for number in range(12)])
        finally:
            device.close()
    # Requests share forwards here, in which a sum's order is another.
    assert sum(mine != theirs for mine, theirs in zip(*said, strict=True)) <= 1


def test_memory_leaves_the_gpu_and_comes_back_as_it_was(rigs, checkpoint):
    config = small_config(checkpoint("llama")[1], pages=1 << 14)
    device = rigs(config, CUDA)
    plane, name = device.plane, "model.layers.1.self_attn.q_proj.weight"
    before, held = told(device, PROMPTS[0], 12), plane.read_weight(name, 64)
    device.next_block = 1
    # Of tests before this one.
    gc.collect()
    torch.cuda.empty_cache()
    allocated, free = torch.cuda.memory_allocated(CUDA), torch.cuda.mem_get_info(CUDA)[0]
    # The pool, 24 KiB a page, and one piece of weights of 64 MiB.
    size = (device.built.startup.pool_bytes + 64 * MIB) * 0.99
    for _ in range(2):
        assert plane.release_memory((Region.WEIGHTS, Region.KV_CACHE)) is None
        assert allocated - torch.cuda.memory_allocated(CUDA) > size
        assert torch.cuda.mem_get_info(CUDA)[0] - free > size
        plane.restore_memory((Region.WEIGHTS, Region.KV_CACHE))
        assert torch.cuda.memory_allocated(CUDA) >= allocated - MIB
        assert plane.read_weight(name, 64).data == held.data
        assert told(device, PROMPTS[0], 12) == before
        device.next_block = 1
    plane.release_memory((Region.KV_CACHE,))
    plane.drop_weights()
    plane.restore_memory((Region.WEIGHTS, Region.KV_CACHE))
    assert plane.absent_weight() is not None


def test_host_memory_beside_a_gpu_is_pinned_and_copies_as_it_is_told():
    host = host_memory(5 * MIB, CUDA)
    assert host.is_pinned()
    host.random_()
    there = host.to(CUDA, non_blocking=True)
    back = host_memory(5 * MIB, CUDA)
    back.copy_(there, non_blocking=True)
    event = torch.cuda.Event(blocking=True)
    event.record()
    event.synchronize()
    assert torch.equal(host, back)


@pytest.mark.parametrize("size", sorted({1, max(1, torch.cuda.device_count())}))
def test_ranks_exchange_over_nccl(size):
    store = distributed.HashStore()

    def rank(index):
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        group = LinkedGroup(store, index, size, host="127.0.0.1", device=device)
        mine = torch.full((3, 2), float(index + 1), device=device)
        joined = group.joined(mine).cpu()
        return group.sum(mine.clone()).cpu(), joined, group.least(7 + index)

    with ThreadPoolExecutor(size) as pool:
        told = list(pool.map(rank, range(size)))
    for summed, joined, least in told:
        assert summed.eq(size * (size + 1) / 2).all()
        assert joined[0].tolist() == [float(index + 1) for index in range(size) for _ in range(2)]
        assert least == 7
