"""A rank's groups, and what it compares with the others before it serves."""

import pytest
from msgspec.structs import replace
from tests.fakes.meshes import meshes

from drumline.collective.in_process import run_ranks
from drumline.contract.layout import Layout
from drumline.core.errors import InvariantError, PeerError
from drumline.rank.company import Company
from drumline.replay.simulator import small_specs


def among(layout, act):
    """Return what `act` makes of each rank's company."""
    return run_ranks(layout.size, lambda mesh: act(Company(layout, mesh.index, mesh)))


def test_replicas_and_peers_are_a_grid_of_ranks():
    layout = Layout(tensor=3, data=2)
    assert [layout.replica(rank) for rank in (0, 4)] == [(0, 1, 2), (3, 4, 5)]
    assert [layout.peers(rank) for rank in (0, 4)] == [(0, 3), (1, 4)]
    assert [layout.data_index(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [layout.tensor_index(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]


def test_ranks_of_a_pipeline_are_numbered_stage_by_stage():
    layout = Layout(tensor=2, data=2, pipeline=3)
    assert (layout.size, layout.members) == (12, 6)
    assert layout.replica(9) == (6, 7, 8, 9, 10, 11)
    assert layout.stage(9) == (8, 9)
    assert layout.line(9) == (7, 9, 11)
    assert layout.peers(9) == (3, 9)
    assert [layout.stage_index(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [rank for rank in range(12) if layout.leads(rank)] == [0, 6]
    assert [layout.leader(data) for data in range(2)] == [0, 6]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(), ["rank0"]),
        (Layout(2, 1), ["rank0_tp0", "rank1_tp1"]),
        (Layout(1, 2), ["rank0_dp0", "rank1_dp1"]),
        (Layout(1, 1, 2), ["rank0_pp0", "rank1_pp1"]),
        (Layout(2, 1, 2), ["rank0_pp0_tp0", "rank1_pp0_tp1", "rank2_pp1_tp0", "rank3_pp1_tp1"]),
        (Layout(2, 2), ["rank0_tp0_dp0", "rank1_tp1_dp0", "rank2_tp0_dp1", "rank3_tp1_dp1"]),
    ],
)
def test_a_rank_is_called_by_its_place(layout, names):
    assert [layout.name(rank) for rank in range(layout.size)] == names


def test_the_first_of_each_replica_leads_and_groups_gather_who_they_should():
    told = among(
        Layout(2, 2),
        lambda company: (
            company.leads,
            company.replica.all_gather_ints([company.rank]),
            company.world.all_gather_ints([company.rank]),
        ),
    )
    assert told == [
        (True, [[0], [1]], [[0], [2]]),
        (False, [[0], [1]], [[1], [3]]),
        (True, [[2], [3]], [[0], [2]]),
        (False, [[2], [3]], [[1], [3]]),
    ]


def test_what_the_first_rank_says_all_are_told():
    told = among(Layout(2, 2), lambda company: company.told(f"rank {company.rank} knows"))
    assert told == ["rank 0 knows"] * 4


def test_a_rank_that_is_alone_meets_itself():
    company = Company(Layout(), 0, None)
    assert company.told("all") == "all"
    assert company.host == ""
    company.compare(small_specs())
    company.meet()
    with company:
        company.watch(lambda error: pytest.fail(str(error)))


def test_members_that_would_plan_with_other_pools_are_stopped_before_they_do():
    def act(company):
        specs = small_specs(num_pages=65 if company.rank < 3 else 64)
        company.compare(specs)

    with pytest.raises(InvariantError, match=r"rank \d of the replica plans with .*64.*") as caught:
        among(Layout(2, 2), act)
    assert "65" in str(caught.value)


def test_replicas_may_have_other_pools_but_not_another_model():
    among(Layout(1, 2), lambda company: company.compare(small_specs(num_pages=9 + company.rank)))

    def act(company):
        specs = small_specs()
        company.compare(replace(specs, model=replace(specs.model, name=f"m{company.rank}")))

    with pytest.raises(InvariantError, match=r"serves .*m1"):
        among(Layout(1, 2), act)


def test_who_is_gone_is_named_by_the_mesh_where_a_library_noticed_first():
    loss = PeerError("rank 0 lost a peer")
    with meshes(2) as (first, second):
        company = Company(Layout(2, 1), 0, first)
        second.fail("it fell")
        assert "rank 1 stopped: it fell" in str(company.cause(loss))
    assert Company(Layout(), 0, None).cause(loss) is loss
