"""The gate's columns on whole engines: what replicas hold is put in by hand, the rest is real."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from drumline.contract.layout import Layout
from drumline.control.gate import Held, Internal
from drumline.control.operations import Operation
from drumline.core.errors import InvariantError
from drumline.replay.fleet import Asked, Scenario, play, submitting
from drumline.replay.simulator import small_specs

LOAD = Operation.UPDATE_WEIGHTS_FROM_DISTRIBUTED
INIT = Operation.INIT_WEIGHTS_GROUP
LAYOUTS = [Layout(1, 2), Layout(1, 3), Layout(2, 2)]
LONG = 40
BY_HAND = [Operation.UPDATE_WEIGHTS_FROM_MOONCAKE, Operation.REBALANCE_EXPERTS]
"""What the loop itself holds never, and so would not carry out."""


class Holding:
    """What one rank brings to the gate, by round, and what it was let pass.

    `queue` are pairs of a round and the operation that arrives in it; the one at the head is
    held until it passes. `facts` says of a round which of the other columns are set.
    """

    def __init__(self, sim, queue=(), facts=lambda round_: {}):
        self.sim = sim
        self.queue = list(queue)
        self.facts = facts
        self.passed = []
        self.error = None
        agreements = sim.loop._agreements
        self._gate = agreements.gate
        self._round = sim.loop.round
        agreements._held, agreements.gate, sim.loop.round = self.held, self.gate, self.round

    def held(self):
        """Return what the real loop would hold, and what is put in."""
        now = len(self.passed)
        head = next(iter(self.queue), None)
        operation = head[1] if head is not None and head[0] <= now else None
        flush = self.sim.loop._controls.flush_wanted
        return replace(Held(flush=flush, operation=operation), **self.facts(now))

    def gate(self, now_us):
        gate, effects = self._gate(now_us)
        self.passed.append(gate)
        if gate.operation is not None:
            assert self.queue.pop(0)[1] is gate.operation
        return gate, effects

    def round(self, stop):
        try:
            return self._round(stop)
        except Exception as error:
            self.error = error
            raise


def asking(layout):
    """Return a scenario in which every engine answers one long request."""
    asked = tuple(
        Asked(engine=engine, rid=f"r{engine}", prompt=(1, 2, 3, engine), limit=LONG, seed=1)
        for engine in range(layout.data)
    )
    acts = {(one.engine, 0): [submitting(one)] for one in asked}
    specs = small_specs(eos_token_ids=(511,))
    return Scenario(layout, 1, specs, (0,) * layout.size, asked, acts)


def held_by(layout, holding):
    """Return a plant that gives every rank a Holding, and those by rank."""
    holdings = {}

    def plant(rank, sim):
        holdings[rank] = holding(layout.data_index(rank), sim)

    return plant, holdings


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", range(3))
def test_ranks_that_hold_different_operations_stop_in_that_round_with_one_message(layout, order):
    def holding(engine, sim):
        # The first engine hears of its operation last; until then nothing is wrong.
        return Holding(sim, [(6, INIT)] if engine == 0 else [(6 - engine, LOAD)])

    plant, holdings = held_by(layout, holding)
    with pytest.raises(InvariantError) as caught:
        play(asking(layout), 1, plant, order=order)
    told = "init_weights_group and update_weights_from_distributed"
    assert told in str(caught.value)
    for rank, one in holdings.items():
        assert str(caught.value) in str(one.error), rank
        assert len(one.passed) == 6, "what was held passed nowhere"
        assert one.sim.loop.records.kept[-1].digest.round == 6, "no round after it was run"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_different_steps_of_the_engines_own_stop_all_as_well(layout):
    def holding(engine, sim):
        own = Internal.SNAPSHOT if engine else Internal.COMMIT
        return Holding(sim, facts=lambda now: {"internal": own} if now == 4 else {})

    plant, holdings = held_by(layout, holding)
    with pytest.raises(InvariantError, match="snapshot and commit"):
        play(asking(layout), 1, plant)
    assert {len(one.passed) for one in holdings.values()} == {4}


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(BY_HAND), st.lists(st.integers(0, 6), min_size=3, max_size=3)),
        max_size=4,
    ),
    layout=st.sampled_from(LAYOUTS),
    order=st.integers(0, 9),
)
@settings(max_examples=15, deadline=None)
def test_an_operation_passes_on_all_ranks_in_the_first_round_in_which_all_hold_it(
    arrivals, layout, order
):
    queues = [[] for _ in range(layout.data)]
    due = 0
    expected = []
    for operation, gaps in arrivals:
        rounds = []
        for queue, gap in zip(queues, gaps, strict=False):
            rounds.append((queue[-1][0] if queue else 0) + gap)
            queue.append((rounds[-1], operation))
        due = max(due, *rounds)
        expected.append((due, operation))
        due += 1
    plant, holdings = held_by(layout, lambda engine, sim: Holding(sim, queues[engine]))
    fleet = play(asking(layout), 1, plant, order=order)
    fleet.check()
    for one in holdings.values():
        ran = [(at, gate.operation) for at, gate in enumerate(one.passed) if gate.operation]
        assert ran == expected
        assert not one.queue


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_released_on_one_replica_keeps_every_rank_from_forwards_until_it_is_back(layout):
    away = range(5, 12)

    def holding(engine, sim):
        return Holding(sim, facts=lambda now: {"lacking": engine == 1 and now in away})

    plant, holdings = held_by(layout, holding)
    fleet = play(asking(layout), 1, plant)
    fleet.check()
    for rank in range(layout.size):
        ran = {round_ for round_, _ in fleet.forwards[rank]}
        assert not ran & set(away)
        assert {away.start - 1, away.stop} <= ran
        assert [at for at, gate in enumerate(holdings[rank].passed) if gate.lacking] == [*away]
    for engine in range(layout.data):
        assert len(fleet.owner(engine).answer(f"r{engine}").ids) == LONG


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_wish_to_release_memory_is_known_to_all_in_that_round(layout):
    def holding(engine, sim):
        return Holding(sim, facts=lambda now: {"release": engine == 0 and now in {3, 4}})

    plant, holdings = held_by(layout, holding)
    play(asking(layout), 1, plant).check()
    for one in holdings.values():
        assert [at for at, gate in enumerate(one.passed) if gate.release] == [3, 4]
