"""The gate: what all replicas do in one round, or none does."""

from itertools import product

import pytest

from drumline.collective.in_process import run_ranks
from drumline.collective.solo import SoloGroup
from drumline.control.gate import Held, Internal, Passed, passed
from drumline.control.operations import Operation
from drumline.core.errors import InvariantError

LOAD = Operation.UPDATE_WEIGHTS_FROM_DISTRIBUTED
INIT = Operation.INIT_WEIGHTS_GROUP
NOTHING = Passed(False, None, None, False, False)


def at_gate(*held):
    """Return what each rank passes with, which must be the same."""
    every = run_ranks(
        len(held), lambda mesh: passed(mesh.group(range(len(held)), "world"), held[mesh.index])
    )
    assert len(set(every)) == 1
    return every[0]


def test_nothing_held_nothing_done():
    assert at_gate(Held(), Held()) == NOTHING
    assert passed(SoloGroup(), Held()) == NOTHING


@pytest.mark.parametrize("fact", ["flush", "release", "lacking"])
def test_one_replica_s_flush_release_or_lack_of_memory_concerns_all(fact):
    for held in product((False, True), repeat=3):
        gate = at_gate(*[Held(**{fact: mine}) for mine in held])
        assert gate == Passed(
            **{
                **dict.fromkeys(("flush", "release", "lacking"), False),
                "operation": None,
                "internal": None,
                fact: any(held),
            }
        )


def test_an_operation_waits_until_all_hold_it():
    assert at_gate(Held(operation=LOAD), Held()) == NOTHING
    assert at_gate(Held(operation=LOAD), Held(operation=LOAD)).operation is LOAD
    assert at_gate(Held(internal=Internal.COMMIT), Held()) == NOTHING
    assert at_gate(*[Held(internal=Internal.COMMIT)] * 3).internal is Internal.COMMIT


@pytest.mark.parametrize("size", [1, 2])
def test_the_frontend_s_operation_goes_first_and_the_engine_s_own_waits_a_round(size):
    both = Held(operation=LOAD, internal=Internal.SNAPSHOT)
    gate = at_gate(*[both] * size)
    assert (gate.operation, gate.internal) == (LOAD, None)


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (
            (Held(operation=INIT), Held(operation=LOAD)),
            "init_weights_group and update_weights_from_distributed",
        ),
        ((Held(internal=Internal.SNAPSHOT), Held(internal=Internal.COMMIT)), "snapshot and commit"),
    ],
)
def test_different_operations_stop_every_rank_with_one_text(theirs, told):
    texts = []

    def main(mesh):
        try:
            passed(mesh.group([0, 1], "world"), theirs[mesh.index])
        except InvariantError as error:
            texts.append(str(error))

    run_ranks(2, main)
    assert len(texts) == 2
    assert len(set(texts)) == 1
    assert told in texts[0]
