"""The control plane and the scheduler against a fake plane: any schedule, the same answers."""

import random
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.replay.arithmetic import answer
from drumline.replay.simulator import Simulation, small_specs

DEPTHS = (0, 1)


def expected(prompt, *, limit, seed=0, vocab_size=512, stops=(0,), min_new_tokens=0):
    """Return the ids and the reason of a request that runs to its end."""
    ids = []
    for token in islice(answer(prompt, seed, vocab_size), limit):
        ids.append(token)
        if token in stops and len(ids) > min_new_tokens:
            return ids, "stop"
    return ids, "length"


def prompt_of(rng, pool, length):
    """Return a prompt that may share its head with others."""
    head = rng.choice(pool)
    cut = rng.randrange(len(head) + 1)
    return (head[:cut] + [rng.randrange(1, 512) for _ in range(length)])[:length]


def play(seed, depth, *, num_pages, encoded=True, lag=0, aborts=True, **options):
    """Run a random script to its end; returns the simulation and what each request asked."""
    rng = random.Random(seed)
    specs = small_specs(num_pages=num_pages, max_rows=rng.choice((1, 3, 8)))
    lags = random.Random(seed + 1)
    sim = Simulation(
        specs, depth=depth, encoded=encoded, lag=lambda: lags.randint(0, lag), **options
    )
    pool = [[rng.randrange(1, 512) for _ in range(40)] for _ in range(3)]
    asked = {}
    for n in range(rng.randint(1, 16)):
        rid = f"r{n}"
        prompt = prompt_of(rng, pool, rng.randint(1, 60))
        limit = rng.randint(1, 24)
        stops = tuple(rng.sample(range(512), rng.choice((0, 0, 40))))
        sim.submit(
            rid,
            prompt,
            max_new_tokens=limit,
            seed=n % 3,
            stream=rng.random() < 0.5,
            stop_token_ids=stops,
        )
        asked[rid] = {"prompt": prompt, "limit": limit, "seed": n % 3, "stops": {0, *stops}}
        sim.run(rng.choice((0, 0, 1, 2, 5)))
        if aborts and rng.random() < 0.25:
            sim.abort(rng.choice(list(asked)))
        sim.loop.check()
    sim.run_until_idle()
    return sim, asked


def check_answers(sim, asked):
    for rid, request in asked.items():
        told = sim.answer(rid)
        room = min(128, sim.scheduler.max_request_tokens) - len(request["prompt"])
        if room < 1:
            assert (told.finished, told.ids) == ("abort", [])
            assert told.details["status_code"] == 400
            continue
        ids, reason = expected(**{**request, "limit": min(request["limit"], room)})
        if told.finished == "abort":
            assert told.ids == ids[: len(told.ids)], "an aborted answer is the head of the whole"
        else:
            assert (told.ids, told.finished) == (ids, reason)
        assert told.completion_tokens == len(told.ids)
        assert told.prompt_tokens == len(request["prompt"])


@pytest.mark.parametrize("depth", DEPTHS)
@given(seed=st.integers(0, 1 << 32), num_pages=st.sampled_from((9, 17, 33, 129)))
@settings(max_examples=60, deadline=None)
def test_any_script_of_arrivals_and_aborts_gives_the_answers_of_an_idle_engine(
    depth, seed, num_pages
):
    sim, asked = play(seed, depth, num_pages=num_pages, lag=4)
    check_answers(sim, asked)
    assert sorted(rid for rid, _ in sim.frontend.over) == sorted(asked), "each ends exactly once"
    sim.check_drained()


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=30, deadline=None)
def test_the_depth_changes_no_answer(seed):
    told = []
    for depth in DEPTHS:
        sim, asked = play(seed, depth, num_pages=65, lag=3, aborts=False)
        told.append({rid: (sim.answer(rid).ids, sim.answer(rid).finished) for rid in asked})
    assert told[0] == told[1]


@pytest.mark.parametrize("options", [{"mixed_batch": False}, {"prefix_caching": False}])
@given(seed=st.integers(0, 1 << 32), depth=st.sampled_from(DEPTHS))
@settings(max_examples=20, deadline=None)
def test_no_policy_changes_an_answer(options, seed, depth):
    sim, asked = play(seed, depth, num_pages=33, lag=3, **options)
    check_answers(sim, asked)
    sim.check_drained()


@given(seed=st.integers(0, 1 << 32), depth=st.sampled_from(DEPTHS))
@settings(max_examples=15, deadline=None)
def test_the_same_script_gives_the_same_rounds(seed, depth):
    first, second = (
        play(seed, depth, num_pages=33, encoded=encoded, lag=lag)[0]
        for encoded, lag in ((True, 0), (False, 5))
    )
    assert first.loop.story() == second.loop.story()
    assert first.frontend.over == second.frontend.over


@pytest.mark.parametrize("depth", DEPTHS)
def test_aborted_rows_are_reused_while_their_forward_still_runs(depth):
    sim = Simulation(small_specs(max_rows=2), depth=depth, lag=lambda: 1 << 20)
    asked = {}
    for n in range(24):
        prompt = [1 + (n * 7 + i) % 500 for i in range(11)]
        sim.submit(f"r{n}", prompt, max_new_tokens=9, seed=n, ignore_eos=True)
        asked[f"r{n}"] = {"prompt": prompt, "limit": 9, "seed": n, "stops": ()}
        sim.run(2)
        if n % 2:
            sim.abort(f"r{n - 1}")
    sim.run_until_idle()
    check_answers(sim, asked)
    sim.check_drained()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_shared_prefix_that_diverges_inside_a_page_is_not_written_into(depth):
    sim = Simulation(depth=depth, lag=lambda: 1 << 20)
    head = list(range(1, 31))
    asked = {}
    for n in range(6):
        prompt = head[: 24 + n]
        sim.submit(f"r{n}", prompt, max_new_tokens=12, seed=n, ignore_eos=True)
        asked[f"r{n}"] = {"prompt": prompt, "limit": 12, "seed": n, "stops": ()}
        sim.run(3)
    sim.run_until_idle()
    check_answers(sim, asked)
    assert sim.answer("r5").cached_tokens > 0
    sim.check_drained()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_pool_that_is_too_small_for_all_still_answers_all(depth):
    sim = Simulation(small_specs(num_pages=17, max_rows=8), depth=depth, lag=lambda: 2)
    asked = {}
    for n in range(10):
        prompt = [1 + (n * 31 + i * i) % 500 for i in range(12)]
        sim.submit(f"r{n}", prompt, max_new_tokens=20, seed=n, ignore_eos=True)
        asked[f"r{n}"] = {"prompt": prompt, "limit": 20, "seed": n, "stops": ()}
    sim.run_until_idle()
    check_answers(sim, asked)
    sim.check_drained()


def test_a_pool_that_runs_out_ends_the_newest_request_with_numbers_and_spares_the_other():
    # Budgets are reserved up to 4096 tokens; what goes beyond may not be there.
    specs = small_specs(
        num_pages=131,
        block_tokens=64,
        prefix_granularity=64,
        max_model_len=8320,
        max_scheduled_tokens=64,
    )
    sim = Simulation(specs, depth=1, lag=lambda: 2)
    for n, rid in enumerate(("old", "new")):
        sim.submit(rid, [n + 1] * 8, seed=n, ignore_eos=True, stream=False)
    sim.run_until_idle(limit=9_000)
    new, old = sim.answer("new"), sim.answer("old")
    assert (new.finished, new.details["status_code"]) == ("abort", 503)
    assert new.details["message"].startswith("out_of_pages: ")
    assert any(word.isdigit() for word in new.details["message"].split())
    ids, reason = expected([1] * 8, limit=sim.scheduler.max_request_tokens - 8, stops=())
    assert (old.ids, old.finished) == (ids, reason)
    assert new.ids == expected([2] * 8, limit=len(new.ids), seed=1, stops=())[0]
    sim.check_drained()
