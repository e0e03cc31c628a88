"""A model in stages computes what it computes whole, bit for bit."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.fakes.meshes import meshes, together
from torch import distributed

from drumline.contract.weights import TensorWeights
from drumline.core.config import Dtype
from drumline.core.errors import ConfigError, InvariantError
from drumline.core.model_files import find_model
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.models.decoder import weight_count
from drumline.device.models.shard import most_layers, shard_of
from drumline.device.parallel import LinkedStages, LostMemberError, Passage, SingleStage

from .conftest import FAMILIES
from .small_rank import SmallDevice, SmallRank, half_of
from .test_models import Loaded
from .test_serving_weights import seated

PROMPT = np.random.default_rng(3).integers(0, 320, 40).astype(np.int32)
QUERY = "model.layers.{}.self_attn.q_proj.weight"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def linked(size):
    """Return the ends of a pipeline, one of each stage."""
    store = distributed.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(
            pool.map(lambda index: LinkedStages(store, index, size, host="127.0.0.1"), range(size))
        )


@torch.inference_mode()
def through(stages, rows, prefixes, chunks):
    """Feed a batch to stages that follow each other, and return its tokens' logits."""
    fed = torch.from_numpy(np.concatenate(chunks).astype(np.int64))
    for part in stages:
        fed = part.decoder.hidden(fed, part.batch(rows, prefixes, chunks), part.attention)
    return stages[-1].decoder.logits(fed)


STEPS = [
    ([1], [0], [PROMPT[:33]]),
    ([1, 2], [33, 0], [PROMPT[33:34], PROMPT[:9]]),
    ([2, 1], [9, 34], [PROMPT[9:20], PROMPT[34:]]),
]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_return_the_whole_model_s_logits_bit_for_bit(checkpoint, family, count):
    _, directory = checkpoint(family)
    whole = Loaded(directory)
    stages = [Loaded(directory, stage=stage, stages=count) for stage in range(count)]
    for step in STEPS:
        assert torch.equal(through(stages, *step), through([whole], *step))


@pytest.mark.parametrize(("layers", "count"), [(3, 1), (3, 2), (3, 3), (30, 4), (31, 4), (7, 5)])
def test_layers_are_shared_out_in_order_and_the_last_stage_has_no_more_than_others(
    checkpoint, layers, count
):
    config = open_checkpoint(find_model(str(checkpoint("llama")[1]))).config
    config = type(config)(**{f: getattr(config, f) for f in config.__struct_fields__} | {
        "layers": layers, "windows": (None,) * layers})  # fmt: skip
    parts = [shard_of(config, 0, 1, stage, count) for stage in range(count)]
    held = [layer for part in parts for layer in range(part.layers.start, part.layers.stop)]
    assert held == list(range(layers))
    sizes = [len(part.layers) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)
    assert max(sizes) == most_layers(config, count)
    assert [part.first for part in parts] == [True] + [False] * (count - 1)
    assert [part.last for part in parts] == [False] * (count - 1) + [True]
    assert sum(weight_count(config, part) for part in parts) == weight_count(config)


def test_a_table_that_serves_as_both_is_held_by_the_first_and_the_last_stage(checkpoint):
    config = open_checkpoint(find_model(str(checkpoint("llama, tied")[1]))).config
    parts = [weight_count(config, shard_of(config, 0, 1, stage, 3)) for stage in range(3)]
    assert sum(parts) == weight_count(config) + config.vocab_size * config.hidden_size


def test_more_stages_than_layers_are_refused(checkpoint):
    config = open_checkpoint(find_model(str(checkpoint("llama")[1]))).config
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size: 4 stages cannot share .* 3"):
        shard_of(config, 0, 1, 0, 4)


# The way from one stage to the next


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_sent_arrives_in_order_and_nobody_waits_to_send(dtype):
    first, second, third = linked(3)
    sent = [torch.full((n + 1, 6), n, dtype=dtype) for n in range(5)]
    # Nothing is received before all of it is sent.
    for x in sent[:4]:
        first.send(x)
    passages = [Passage(each, 6, dtype) for each in (first, second, third)]
    assert [(each.first, each.last) for each in passages] == [
        (True, False), (False, False), (False, True),
    ]  # fmt: skip

    def middle():
        for n in range(5):
            passages[1].send(passages[1].received(n + 1) + 1)

    with ThreadPoolExecutor(2) as pool:
        passing = pool.submit(middle)
        first.send(sent[4])
        for n, x in enumerate(sent):
            assert torch.equal(passages[2].received(n + 1), x + 1)
        passing.result()


def test_the_smallest_of_all_stages_is_everybodys():
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda one: one.least(9 - one.index), linked(3))) == [7, 7, 7]


def test_a_stage_whose_sender_is_gone_says_so():
    ends = linked(2)
    heard = []

    def wait():
        try:
            ends[1].received((4, 4), torch.float32)
        except LostMemberError as error:
            heard.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    del ends[0]
    waiting.join(10)
    assert len(heard) == 1
    assert heard[0].startswith("pipeline stage 1 lost a peer: ")


def test_a_rank_with_all_layers_has_nobody_to_send_to():
    alone = SingleStage()
    assert alone.least(7) == 7
    with pytest.raises(InvariantError):
        alone.send(torch.zeros(1))
    with pytest.raises(InvariantError):
        alone.received((1,), torch.float32)


def test_only_the_last_stage_has_a_head(checkpoint):
    part = Loaded(checkpoint("llama")[1], stage=0, stages=2)
    with pytest.raises(InvariantError, match="the last stage alone has a head"):
        part.decoder.logits(torch.zeros(1, 64))


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_two_stages_say_what_one_rank_says_in_any_float_type(checkpoint, dtype):
    directory = checkpoint("qwen3")[1]
    store, stop = distributed.HashStore(), threading.Event()
    prompts = {f"r{n}": PROMPT[n : n + 5 + 7 * n] for n in range(5)}
    how = {"model": {"dtype": dtype, "deterministic": True}}

    def ask(rank):
        for rid, prompt in prompts.items():
            rank.submit(rid, prompt, max_new_tokens=12)
        while rank.frontend.live or rank.frontend.queued:
            rank.run()
        return {rid: rank.answer(rid).ids for rid in prompts}

    def serve(end):
        device = half_of(directory, store, end.index, 2, **how)
        replica, pipeline = end.group([0, 1]), end.group([0, 1], "pipeline")
        leads = end.index == 0
        rank = SmallRank(device, depth=2, chunk=9, replica=replica, pipeline=pipeline, leads=leads)
        told = ask(rank) if leads else None
        if leads:
            stop.set()
        while not rank.loop.round(stop.is_set()):
            pass
        device.close()
        return told

    alone = SmallDevice(directory, **how)
    expected = ask(SmallRank(alone, depth=1, chunk=9))
    alone.close()
    with meshes(2) as ends:
        assert together(ends, serve) == [expected, None]


# Weights by name


@pytest.mark.parametrize("family", ["llama", "llama, tied", "qwen3"])
def test_each_weight_is_told_by_the_stages_that_have_it(checkpoint, family):
    directory = checkpoint(family)[1]
    whole = seated(directory, 0, 1)
    parts = [seated(directory, 0, 1, stage=stage, stages=3) for stage in range(3)]
    tied = family == "llama, tied"
    names = {*whole._live.places}
    assert {*parts[0]._live.places, *parts[0]._live.elsewhere} == names
    for name in names:
        told = [part.rows(name, 5) for part in parts]
        having = [stage for stage, each in enumerate(told) if each is not None]
        match name.split("."):
            case ["model", "layers", layer, *_]:
                assert having == [int(layer)]
            case _ if tied and name in {EMBEDDING, HEAD}:
                assert having == [0, 2]
            case _:
                assert having == [0 if name == EMBEDDING else 2]
        for stage in having:
            assert told[stage].data == whole.rows(name, 5).data
    assert all("no weight here is called model.nrm" in part.rows("model.nrm", 1) for part in parts)


def test_an_update_of_tensors_reaches_the_stages_that_have_them(checkpoint):
    directory = checkpoint("llama")[1]
    parts = [seated(directory, 0, 1, stage=stage, stages=2) for stage in range(2)]
    new = {QUERY.format(2): torch.full((64, 64), 2.0), EMBEDDING: torch.full((320, 64), 3.0)}
    for part in parts:
        assert part.open(TensorWeights(safetensors.torch.save(new))) is None
        assert part.load() is None
        part.settle(True)
    assert parts[0].rows(QUERY.format(2), 1) is None
    assert np.frombuffer(parts[1].rows(QUERY.format(2), 1).data, np.float32).tolist() == [2.0] * 64
    assert np.frombuffer(parts[0].rows(EMBEDDING, 1).data, np.float32).tolist() == [3.0] * 64
    wrong = TensorWeights(safetensors.torch.save({QUERY.format(2): torch.zeros(2)}))
    assert [part.open(wrong) is None for part in parts] == [True, False]
    unknown = TensorWeights(safetensors.torch.save({QUERY.format(3): torch.zeros(64, 64)}))
    assert all("no weight here is called" in part.open(unknown) for part in parts)
