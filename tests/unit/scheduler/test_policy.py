"""Who is admitted first, who may wait, and that nobody waits for ever."""

import pytest
from scheduler_rig import Rig, config

from drumline.core.config import CacheConfig, Config, ScheduleConfig, SchedulingPolicy
from drumline.core.errors import ConfigError
from drumline.replay.simulator import small_specs
from drumline.scheduler.config import SchedulerConfig


def prompt(head: int, tokens: int) -> list[int]:
    """A prompt that shares nothing with those of other heads."""
    return [head * 100 + at for at in range(tokens)]


def line_up(rig: Rig, *names: str, **priorities: int) -> None:
    for head, name in enumerate(names, 1):
        rig.submit(name, prompt(head, 4), priority=priorities.get(name, 0))


def admitted_in_turn(rig: Rig, rounds: int) -> list[str]:
    """The requests in the order of their first chunks; each is ended so that the next fits."""
    order: list[str] = []
    for _ in range(rounds):
        for bound in rig.round().bound:
            order.append(bound.rid)
            rig.abort(bound.rid)
    return order


def test_requests_are_admitted_as_they_came_whatever_their_priority():
    rig = Rig(max_rows=1)
    line_up(rig, "a", "b", "c", b=5)
    assert admitted_in_turn(rig, 3) == ["a", "b", "c"]


def test_a_higher_priority_is_admitted_first_and_within_one_who_came_first():
    rig = Rig(max_rows=1, priorities=True)
    line_up(rig, "a", "b", "c", "d", "e", b=1, c=-2, d=7, e=1)
    assert admitted_in_turn(rig, 5) == ["d", "b", "e", "a", "c"]


def test_a_priority_does_not_stop_what_runs():
    rig = Rig(max_rows=1, priorities=True)
    line_up(rig, "a")
    rig.round()
    rig.submit("b", prompt(9, 4), priority=9)
    assert rig.rids(rig.round()) == ["a"]
    assert rig.scheduler.sizes().waiting == 1


def test_without_patience_smaller_requests_may_pass_a_big_one_for_ever():
    assert plans_that_admit_others_before_the_big_one(patience=None) is None


@pytest.mark.parametrize("patience", [1, 3, 8])
def test_a_request_that_was_passed_by_often_enough_goes_before_everybody(patience):
    assert plans_that_admit_others_before_the_big_one(patience=patience) == patience


def plans_that_admit_others_before_the_big_one(patience: int | None) -> int | None:
    """Small requests keep coming, two at a time in the pool; each lives four rounds."""
    plans = 0
    rig = Rig(num_pages=9, patience=patience, prefix_caching=False)
    rig.submit("s0", prompt(1, 8))
    rig.round()
    rig.submit("big", prompt(2, 24))
    ages = {"s0": 1}
    for number in range(1, 60):
        if number % 2:
            rig.submit(f"s{number}", prompt(number, 8))
        plan = rig.round()
        if any(bound.rid == "big" for bound in plan.bound):
            return plans
        plans += bool(plan.bound)
        for bound in plan.bound:
            ages[bound.rid] = 0
        for rid in list(ages):
            ages[rid] += 1
            if ages[rid] > 4:
                rig.finish(rid)
                del ages[rid]
    return None


def test_a_low_priority_is_admitted_after_as_many_plans_as_the_patience():
    rig = Rig(max_rows=1, priorities=True, patience=3)
    rig.submit("low", prompt(50, 4), priority=-1)
    order: list[str] = []
    for number in range(8):
        rig.submit(f"h{number}", prompt(number, 4), priority=1)
        order += admitted_in_turn(rig, 1)
    assert order[:4] == ["h0", "h1", "h2", "low"]


def test_a_queue_takes_as_many_requests_as_its_limit_beside_those_that_have_rows():
    rig = Rig(max_rows=2, max_queued_requests=1)
    for head, name in enumerate("abc", 1):
        assert rig.submit(name, prompt(head, 4)) is None
    assert rig.submit("d", prompt(4, 4)) == (
        "3 requests wait and 2 rows are free: with 1 more, the queue's limit of 1 requests "
        "is exceeded"
    )
    assert not rig.scheduler.knows("d")
    rig.round()
    assert rig.submit("d", prompt(4, 4)) is not None, "c waits still"
    rig.abort("a")
    rig.round()
    assert rig.submit("d", prompt(4, 4)) is None


def test_a_queue_takes_prompts_up_to_its_limit_and_a_long_one_where_nothing_waits():
    rig = Rig(max_rows=1, max_queued_tokens=10)
    assert rig.submit("a", prompt(1, 30)) is None
    assert rig.submit("b", prompt(2, 4)) == (
        "30 prompt tokens wait: with 4 more, the queue's limit of 10 tokens is exceeded"
    )
    rig.round()
    assert rig.submit("b", prompt(2, 4)) is None
    assert rig.submit("c", prompt(3, 6)) is None
    assert rig.submit("d", prompt(4, 1)) is not None


def test_a_batch_over_the_queues_limit_is_refused_whole():
    rig = Rig(max_rows=1, max_queued_requests=1)
    assert rig.scheduler.crowded(2, 8) is None
    assert rig.scheduler.crowded(3, 12) is not None


def test_an_aborted_request_no_longer_counts_against_the_queues_limits():
    rig = Rig(max_rows=1, max_queued_tokens=8)
    rig.submit("a", prompt(1, 4))
    rig.submit("b", prompt(2, 4))
    assert rig.submit("c", prompt(3, 4)) is not None
    rig.abort("b")
    assert rig.submit("c", prompt(3, 4)) is None


def test_what_the_operator_chose_reaches_the_scheduler():
    chosen = Config(
        schedule=ScheduleConfig(
            mixed_batch=False,
            mixed_prefill_tokens=7,
            scheduling_policy=SchedulingPolicy.PRIORITY,
            scheduling_patience=5,
            max_num_queued_reqs=3,
            max_num_queued_tokens=90,
        ),
        cache=CacheConfig(share_prefix_in_flight=False),
    )
    of = SchedulerConfig.of(small_specs(), chosen)
    assert (of.mixed_batch, of.mixed_prefill_tokens, of.share_in_flight) == (False, 7, False)
    assert (of.priorities, of.patience) == (True, 5)
    assert (of.max_queued_requests, of.max_queued_tokens) == (3, 90)


def test_by_default_every_policy_is_neutral_but_that_prompts_slow_answers_by_a_bounded_time():
    of = SchedulerConfig.of(small_specs(), Config())
    assert (of.priorities, of.patience) == (False, None)
    assert (of.max_queued_requests, of.max_queued_tokens) == (None, None)
    assert (of.mixed_batch, of.mixed_prefill_tokens, of.share_in_flight) == (True, 256, True)


@pytest.mark.parametrize("name", ["patience", "max_queued_requests", "max_queued_tokens"])
def test_a_limit_below_one_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=name):
        config(**{name: 0})
