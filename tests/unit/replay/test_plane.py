from itertools import islice

import msgspec
import numpy as np
import pytest

from drumline.contract.cache import BlockMoves
from drumline.contract.outputs import Load, OutputColumns
from drumline.contract.plan import Batch, Bound, Plan, TablePatch
from drumline.contract.ports import Dispatch
from drumline.contract.request import Admission, Sampling
from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.core.errors import ConfigError, InvariantError
from drumline.replay.arithmetic import answer
from drumline.replay.clock import ManualClock
from drumline.replay.frontend import ScriptedFrontend
from drumline.replay.plane import PagedPlane
from drumline.replay.simulator import small_specs

PROMPT = list(range(10, 16))
TOKENS = list(islice(answer(PROMPT, 3, 512), 4))


def ints(*values):
    return np.array(values, np.int32)


def patch(columns, blocks, row=1):
    return TablePatch(0, ints(*[row] * len(columns)), ints(*columns), ints(*blocks))


def prefill(round_=1, *, tokens=PROMPT, before=0, patches=(), bound=True, **fields):
    return Plan(
        round=round_,
        bound=(Bound(1, 1, "a"),) if bound else (),
        patches=patches,
        batch=Batch(
            rows=ints(1),
            generations=ints(1),
            input_lengths=ints(len(tokens)),
            prefix_lengths=ints(before),
            extends=1,
            extend_ids=ints(*tokens),
            prompt_lengths=ints(len(PROMPT)),
        ),
        **fields,
    )


def decode(round_, before, *patches, generation=1, **fields):
    batch = Batch(
        rows=ints(1),
        generations=ints(generation),
        input_lengths=ints(1),
        prefix_lengths=ints(before),
    )
    return Plan(round=round_, batch=batch, patches=patches, **fields)


@pytest.fixture
def plane():
    lazy = PagedPlane(small_specs(), lag=lambda: 1 << 20)
    lazy.admit([Admission(rid="a", prompt_tokens=6, sampling=Sampling(seed=3))])
    return lazy


def run(plane, *plans):
    """Run all plans before any is completed; returns each one's tokens."""
    tickets = [plane.execute(plan, Dispatch()) for plan in plans]
    return [plane.complete(ticket).tokens.tolist() for ticket in tickets]


FIRST = patch([0, 1], [7, 3])


def test_pages_that_are_right_give_the_answer_however_the_prompt_is_cut(plane):
    tokens = run(
        plane,
        prefill(tokens=PROMPT[:4], patches=(FIRST,)),
        prefill(2, tokens=PROMPT[4:], before=4, bound=False),
        decode(3, 6),
        decode(4, 7),
        decode(5, 8, patch([2], [9])),
    )
    assert tokens == [[], *([token] for token in TOKENS)]


def test_a_later_plans_table_is_not_seen_by_a_forward_that_still_waits(plane):
    tokens = run(
        plane, prefill(patches=(FIRST,)), decode(2, 6), decode(3, 7, patch([0, 1], [8, 2]))
    )
    assert tokens[:2] == [[TOKENS[0]], [TOKENS[1]]]
    assert tokens[2] != [TOKENS[2]], "the last one reads pages that nobody wrote"


def test_a_private_copy_carries_on_where_the_shared_page_was(plane):
    copied = decode(2, 6, patch([1], [20]), copies=(BlockMoves(0, ints(3), ints(20)),))
    assert run(plane, prefill(patches=(FIRST,)), copied, decode(3, 7)) == [
        [token] for token in TOKENS[:3]
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param([decode(2, 6, patch([0], [8]))], id="a lost page"),
        pytest.param([decode(2, 5)], id="a position too early"),
        pytest.param([decode(2, 7)], id="a position too late"),
    ],
)
def test_a_wrong_page_or_position_changes_the_tokens(plane, wrong):
    tokens = run(plane, prefill(patches=(FIRST,)), *wrong)
    assert tokens[1] != [TOKENS[1]]


def test_a_row_of_another_generation_is_refused(plane):
    with pytest.raises(InvariantError, match="row 1 of generation 2"):
        run(plane, prefill(patches=(FIRST,)), decode(2, 6, generation=2))


def test_a_forward_that_reads_a_released_request_is_refused(plane):
    plane.execute(prefill(patches=(FIRST,)), Dispatch())
    plane.release(["a"])
    ticket = plane.execute(decode(2, 6), Dispatch())
    plane.complete(1)
    with pytest.raises(InvariantError, match="'a', which is released"):
        plane.complete(ticket)


def test_requests_are_admitted_and_released_once(plane):
    plane.release(["a"])
    plane.release(["a"])
    with pytest.raises(InvariantError, match="'a' is released but not admitted"):
        assert plane.known
    plane.admit([Admission(rid="b", prompt_tokens=1, sampling=Sampling())] * 2)
    with pytest.raises(InvariantError, match="'b' is admitted twice"):
        assert plane.known


def test_forwards_are_completed_in_order(plane):
    plane.execute(prefill(patches=(FIRST,)), Dispatch())
    ticket = plane.execute(decode(2, 6), Dispatch())
    with pytest.raises(InvariantError, match="forward 2 completed after forward 0"):
        plane.complete(ticket)


def test_the_scripted_frontend_holds_the_engine_to_the_wire():
    frontend = ScriptedFrontend(ManualClock())
    with pytest.raises(InvariantError, match="ragged output columns"):
        frontend.send(OutputColumns(rids=["a"]), Load(0, 0, 0, 1))
    whole = OutputColumns(**{name: [[]] for name in OutputColumns.__struct_fields__})
    whole.rids = ["a"]
    with pytest.raises(InvariantError, match="'a', which is over or was never submitted"):
        frontend.send(whole, Load(0, 0, 0, 1))


def test_state_groups_are_refused_by_name():
    state = CacheGroup(group_id="state", kind=AttentionKind.STATE, block_tokens=0)
    specs = small_specs()
    with pytest.raises(ConfigError, match=r"groups\[state\]"):
        PagedPlane(msgspec.structs.replace(specs, groups=(*specs.groups, state)))
