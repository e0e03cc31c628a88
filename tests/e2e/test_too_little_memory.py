"""A real model on a KV pool too small for what is asked of it: nothing is lost, all is as before.

The whole rank but its wire runs in this process: scheduler, loop and device.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
import transformers
from tests.e2e.whole_rank import (
    ROUNDS,
    SAMPLINGS,
    WAVER,
    Rank,
    answers,
    check_fed_once,
    parted,
    prompts,
    same,
    told,
)

from drumline.contract.messages import AbortAsked
from drumline.contract.request import Sampling
from drumline.core.config import Dtype, WritePolicy


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A directory with a small model of random weights that never ends by itself."""
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=None,
    )
    torch.manual_seed(5)
    directory = tmp_path_factory.mktemp("tiny")
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    return str(directory)


@pytest.fixture
def rank():
    made = []

    def of(*args, **fields):
        made.append(Rank(*args, **fields))
        return made[-1]

    yield of
    for each in made:
        each.close()


def test_a_pool_a_third_the_size_gives_every_text_and_computes_nothing_twice(tiny, rank):
    # 64 requests of 600 tokens that want 400 more, which nobody declares beforehand.
    asked = prompts(64, length=600)
    fields = {"seqs": 64, "context": 1000}
    ample = answers(rank(tiny, pages=4200, **fields), asked)
    short = rank(tiny, pages=1400, **fields)
    same(answers(short, asked), ample, 1e-4)
    check_fed_once(short, asked, 1000)
    assert short.counters.retractions > 10
    assert short.counters.restores == short.counters.retractions
    short.check_drained()


@pytest.mark.skipif(not os.environ.get("DRUMLINE_SOAK_MEMORY"), reason="played by make soak")
def test_a_pool_a_third_the_size_gives_every_text_in_bfloat16_too(tiny, rank):
    asked = prompts(64, length=600)
    fields = {"seqs": 64, "context": 1000}
    ample = told(rank(tiny, Dtype.BFLOAT16, pages=4200, **fields), asked)
    short = rank(tiny, Dtype.BFLOAT16, pages=1344, **fields)
    parted(told(short, asked), ample, WAVER[Dtype.BFLOAT16])
    check_fed_once(short, asked, 1000)
    assert short.counters.restores == short.counters.retractions > 10
    short.check_drained()


def test_forced_retraction_every_so_many_plans_changes_no_text_and_no_logprob(tiny, rank):
    asked = prompts(3)
    expected = answers(rank(tiny, pages=60), asked)
    for interval in range(1, 8):
        engine = rank(tiny, pages=60, debug_force_retraction_interval=interval)
        same(answers(engine, asked), expected, 1e-4)
        check_fed_once(engine, asked)
        assert engine.counters.retractions > 10
        engine.check_drained()


def test_ends_and_aborts_of_suspended_requests_leave_every_pool_as_it_was(tiny, rank):
    engine = rank(tiny, pages=60, debug_force_retraction_interval=2)
    for n, prompt in enumerate(prompts(6)):
        engine.ask(f"r{n}", prompt, SAMPLINGS[n % 3])
    gone = set()
    for _ in range(ROUNDS):
        engine.run(1)
        for rid, image in engine.scheduler._retraction._images.items():
            if image.wanted and len(gone) < 5 and rid not in gone:
                gone.add(rid)
                engine.frontend.push(AbortAsked((rid,)))
                break
        if engine.loop.idle and not engine.frontend.queued:
            break
    assert len(gone) == 5
    assert {engine.frontend.ended(rid).finished for rid in gone} == {"abort"}
    engine.check_drained()


@pytest.mark.parametrize(
    "place", [{"retraction_snapshot_max_requests": 0}, {"retraction_snapshot_host_gb": 0}]
)
def test_without_a_place_the_newest_ends_with_the_reason_and_the_others_as_ever(tiny, rank, place):
    asked = prompts(8)
    ample = answers(rank(tiny, pages=100), asked)
    engine = rank(tiny, pages=30, **place)
    for n, prompt in enumerate(asked):
        engine.ask(f"r{n}", prompt, SAMPLINGS[n % 3])
    engine.run_until_idle()
    told = [engine.frontend.ended(f"r{n}") for n in range(8)]
    ended = [each for each in told if each.finished == "abort"]
    assert ended
    for each in ended:
        assert each.details["message"].startswith("out_of_pages: none of 30 pages is free")
    for each, (ids, _) in zip(told, ample, strict=True):
        assert each.ids == ids[: len(each.ids)]
        assert each.finished == "abort" or each.ids == ids
    engine.check_drained()


def test_one_slot_serves_all_one_after_the_other_or_says_why_not(tiny, rank):
    asked = prompts(8)
    ample = answers(rank(tiny, pages=100), asked)
    engine = rank(tiny, pages=50, retraction_snapshot_max_requests=1)
    for n, prompt in enumerate(asked):
        engine.ask(f"r{n}", prompt, SAMPLINGS[n % 3])
    engine.run_until_idle()
    for n, (ids, _) in enumerate(ample):
        told = engine.frontend.ended(f"r{n}")
        assert told.ids == ids[: len(told.ids)]
        if told.finished == "abort":
            assert "1 requests are suspended, as many as may be" in told.details["message"]
    assert engine.counters.retractions > 0
    engine.check_drained()


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_second_turn_whose_pages_left_the_device_is_answered_from_host_memory(tiny, policy):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 320, 60).tolist() for _ in range(7)]
    ample = Rank(tiny, pages=200)
    small = Rank(tiny, pages=24, kvstore=True, kvstore_ratio=8.0, kvstore_write_policy=policy)
    said = []
    for rank in (ample, small):
        for n, prompt in enumerate(prompts):
            rank.ask(f"r{n}", prompt, Sampling(temperature=0.0), 12)
            rank.run_until_idle()
            rank.run(3)
            rank.run_until_idle()
        first = rank.frontend.ended("r0")
        rank.ask("again", [*prompts[0], *first.ids, 5, 6, 7], Sampling(temperature=0.0), 12)
        rank.run_until_idle()
        said.append(rank.frontend.ended("again"))
    assert small.counters.hit_tokens >= 48
    assert said[1].cached_tokens >= 48
    assert said[1].ids == said[0].ids
