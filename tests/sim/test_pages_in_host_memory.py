"""Prompts whose pages left the device come back from host memory and are answered the same."""

import random
from itertools import islice

import pytest

from drumline.core.config import WritePolicy
from drumline.replay.arithmetic import answer
from drumline.replay.simulator import Simulation, small_specs

VOCAB = 512


def specs(**changes):
    fields = {"num_pages": 33, "num_host_pages": 129, "eos_token_ids": ()}
    return small_specs(**(fields | changes))


def ask(sim, rid, prompt, tokens, seed=0):
    sim.submit(rid, prompt, max_new_tokens=tokens, seed=seed)
    sim.run_until_idle(3000)
    told = sim.answer(rid)
    assert told.finished == "length"
    assert told.ids == list(islice(answer(prompt, seed, VOCAB), tokens))
    sim.run(8)  # what was served is stored
    return told


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_second_turn_whose_pages_left_the_device_loads_them_back(policy, depth):
    rng = random.Random(depth)
    sim = Simulation(specs(), depth=depth, host_write_policy=policy, delay=lambda op: 2)
    prompt = [rng.randrange(1, VOCAB) for _ in range(40)]
    first = ask(sim, "first", prompt, 10)
    for n in range(4):
        ask(sim, f"other{n}", [rng.randrange(1, VOCAB) for _ in range(80)], 4)
    second = ask(sim, "second", prompt + first.ids + [7, 8, 9], 6)
    assert second.cached_tokens >= 40
    counters = sim.loop._cache_ops.counters
    assert counters.hit_tokens >= 40
    assert counters.host.loaded_blocks >= 10
    sim.check_drained()


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("seed", range(3))
def test_crowds_on_a_small_pool_with_a_tier_are_answered_right(policy, seed):
    rng = random.Random(seed)
    sim = Simulation(
        specs(
            num_pages=40,
            num_host_pages=rng.choice((9, 60)),
            num_snapshot_pages=60,
            max_retracted_requests=8,
        ),
        depth=seed % 2,
        host_write_policy=policy,
        lag=lambda: rng.randrange(3),
        delay=lambda op: rng.randrange(6),
        force_retraction_interval=9,
    )
    heads = [[rng.randrange(1, VOCAB) for _ in range(32)] for _ in range(5)]
    prompts = {}
    for n in range(24):
        tail = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 12))]
        prompts[f"r{n}"] = rng.choice(heads) + tail
        sim.submit(f"r{n}", prompts[f"r{n}"], max_new_tokens=12, seed=n)
        sim.run(rng.randint(1, 12))
        sim.loop.check()
    sim.run_until_idle(6000)
    for n, (rid, prompt) in enumerate(prompts.items()):
        assert sim.answer(rid).ids == list(islice(answer(prompt, n, VOCAB), 12)), rid
    sim.run(20)
    sim.check_drained()
    assert sim.loop._cache_ops.counters.host.stored_blocks > 0


def test_a_load_that_fails_ends_its_request_with_a_reason_and_nobody_elses():
    failing = set()

    def fails(op):
        return type(op).__name__ in failing

    sim = Simulation(specs(), failing=fails)
    prompt = list(range(1, 41))
    ask(sim, "first", prompt, 4)
    for n in range(4):
        ask(sim, f"other{n}", [100 * n + at for at in range(1, 81)], 4)
    failing.add("LoadBack")
    sim.submit("second", [*prompt, 3], max_new_tokens=40)
    sim.submit("bystander", [5, 6, 7], max_new_tokens=20)
    sim.run_until_idle(3000)
    told = sim.answer("second")
    assert told.finished == "abort"
    assert told.details["message"].startswith("load_failed")
    assert sim.answer("bystander").ids == list(islice(answer([5, 6, 7], 0, VOCAB), 20))
    failing.clear()
    ask(sim, "third", [*prompt, 3], 6)
    sim.check_drained()
