"""Which rows a pipeline's forwards have, so that every stage computes and none waits for itself."""

import pytest
from scheduler_rig import Rig, config

from drumline.contract.cache import Restore, Snapshot
from drumline.contract.internal_state import Adjustments
from drumline.core.config import Config, ParallelConfig, ScheduleConfig
from drumline.core.errors import ConfigError
from drumline.replay.simulator import small_specs
from drumline.scheduler.config import SchedulerConfig


def decoding(stages, rows, **changes):
    """Return a rig whose `rows` requests, a, b, c …, all decode, with nothing in flight."""
    rig = Rig(stages=stages, max_rows=rows, num_pages=400, **changes)
    for n in range(rows):
        rig.submit(chr(ord("a") + n), [100 * n + at for at in range(5)])
    rig.round()
    return rig


def flow(rig, rounds, depth):
    """Run rounds as the loop does: down to `depth`, or the oldest where nothing is dispatched."""
    told = []
    for _ in range(rounds):
        plan = rig.plan()
        told.append("".join(sorted(rig.rids(plan))))
        keep = depth if plan.batch is not None else min(depth, len(rig.in_flight) - 1)
        while len(rig.in_flight) > max(keep, 0):
            rig.commit()
    return told


def test_rows_take_turns_so_that_as_many_forwards_as_stages_are_under_way():
    assert flow(decoding(2, 4), 6, 2) == ["ab", "cd", "", "ab", "", "cd"]
    assert flow(decoding(3, 6), 8, 3) == ["ab", "cd", "ef", "", "ab", "", "cd", ""]
    assert flow(decoding(2, 3), 6, 2) == ["ab", "c", "", "ab", "", "c"]


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("rows", [1, 2, 5, 7])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5])
def test_nobody_is_left_behind_at_any_depth(stages, rows, depth):
    rig = decoding(stages, rows)
    told = "".join(flow(rig, 24 * stages, depth))
    turns = [told.count(chr(ord("a") + n)) for n in range(rows)]
    assert min(turns) >= 10
    assert max(turns) - min(turns) <= 1 or (depth < stages - 1 and max(turns) <= 2 * min(turns))


def test_nobody_is_left_behind_where_a_forward_has_fewer_tokens_than_a_stage_has_rows():
    rig = decoding(2, 10)
    assert rig.scheduler.adjust(Adjustments(chunked_prefill_size=2)) is None
    told = "".join(flow(rig, 60, 2))
    turns = [told.count(name) for name in "abcdefghij"]
    assert min(turns) >= 10
    assert max(turns) - min(turns) <= 1


def test_a_row_joins_once_its_first_token_has_come():
    rig = Rig(stages=2)
    rig.submit("a", 5)
    assert rig.rids(rig.plan()) == ["a"]
    assert rig.plan().batch is None
    rig.commit()
    batch = rig.plan().batch
    assert (batch.extends, batch.decode_ids.tolist()) == (0, [5 * 7 % 50])


def test_chunks_of_one_prompt_follow_each_other_without_a_result():
    rig = Rig(stages=2, max_scheduled_tokens=8)
    rig.submit("a", 32)
    plans = [rig.plan() for _ in range(4)]
    assert [plan.batch.prefix_lengths.tolist() for plan in plans] == [[0], [8], [16], [24]]


def test_prompts_fill_the_pipe_while_decodes_wait_for_their_tokens():
    rig = decoding(2, 2, max_scheduled_tokens=16)
    rig.abort("b")
    rig.submit("c", [500 + at for at in range(60)])
    told = []
    for _ in range(4):
        told.append(rig.rids(rig.plan()))
        while len(rig.in_flight) > 2:
            rig.commit()
    assert told == [["c", "a"], ["c"], ["c"], ["c", "a"]]


def test_nobody_is_suspended_for_rows_whose_results_are_under_way():
    # Each of two decodes has room until one of them needs the last page.
    rig = Rig(
        stages=2, num_pages=6, max_rows=2, num_snapshot_pages=9, max_retracted_requests=2,
        prefix_caching=False,
    )  # fmt: skip
    for name in "ab":
        rig.submit(name, 7)
    suspensions = []
    for _ in range(40):
        plan = rig.plan()
        owed = bool(rig.in_flight) and plan.batch is None
        suspensions += [op for op in plan.cache_ops if isinstance(op, Snapshot)]
        assert not (owed and plan.cache_ops)
        while len(rig.in_flight) > (1 if plan.batch is not None else 0):
            rig.commit()
        while rig.unacknowledged:
            rig.acknowledge()
    assert suspensions, "the pool was to run full"


def test_a_suspended_row_comes_back_with_what_it_feeds():
    rig = decoding(2, 3, num_snapshot_pages=60, max_retracted_requests=3,
                   debug_force_retraction_interval=3)  # fmt: skip
    for _ in range(60):
        flow(rig, 1, 2)
        while rig.unacknowledged:
            rig.acknowledge()
    ops = [op for plan in rig.plans for op in plan.cache_ops]
    assert any(isinstance(op, Snapshot) for op in ops)
    assert any(isinstance(op, Restore) for op in ops), "what it fed then, the rig checked"


def test_rows_of_a_pipeline_never_run_ahead_of_their_results():
    with pytest.raises(ConfigError, match="rows of a pipeline wait for their results"):
        config(stages=2, overlap_depth=1)
    with pytest.raises(ConfigError, match="stages: must be at least 1"):
        config(stages=0)


@pytest.mark.parametrize(
    ("stages", "overlap", "depth", "rows_ahead"),
    [(1, True, 1, 1), (1, False, 0, 0), (2, True, 2, 0), (3, False, 3, 0)],
)
def test_a_pipeline_has_a_forward_in_flight_for_each_stage(stages, overlap, depth, rows_ahead):
    chosen = Config(
        parallel=ParallelConfig(pipeline_parallel_size=stages),
        schedule=ScheduleConfig(overlap_schedule=overlap),
    )
    made = SchedulerConfig.of(small_specs(), chosen)
    assert (chosen.in_flight_depth, made.overlap_depth, made.stages) == (depth, rows_ahead, stages)
