"""Ranks of one thread that switch at exchanges."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.programs import carry_out, expected, programs

from drumline.collective.in_process import run_ranks
from drumline.contract.ports import Reduce
from drumline.core.errors import InvariantError, PeerError


@given(program=programs(4), seed=st.integers(0, 1 << 32))
@settings(deadline=None)
def test_any_sequence_of_exchanges_gives_what_the_model_says(program, seed):
    results = run_ranks(4, lambda mesh: carry_out(mesh, program, "group"), seed)
    assert results == [expected(program, rank) for rank in range(4)]


def order(seed, ranks=6, rounds=5):
    """Return in which order ranks ran between their exchanges."""
    seen = []

    def main(mesh):
        group = mesh.group(range(ranks))
        for _ in range(rounds):
            seen.append(mesh.index)
            group.all_gather(b"")

    run_ranks(ranks, main, seed)
    return seen


def test_a_seed_names_a_schedule():
    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in range(20)}) == 20


def test_ranks_switch_at_exchanges_only():
    inside = []

    def main(mesh):
        group = mesh.group(range(3))
        for _ in range(4):
            inside.append(mesh.index)
            assert len(inside) == 1
            inside.clear()
            group.all_reduce([1], Reduce.SUM)
        return mesh.index

    assert run_ranks(3, main) == [0, 1, 2]


def test_what_one_rank_does_to_its_result_no_other_sees():
    def main(mesh):
        group = mesh.group(range(3))
        rows = group.all_gather_ints([mesh.index])
        rows[0].append(99)
        rows.append([99])
        payloads = group.all_gather(b"")
        payloads.clear()
        sums = group.all_reduce([1], Reduce.SUM)
        sums.append(1)
        return len(rows), len(rows[0]), sums

    assert run_ranks(3, main) == [(4, 2, [3, 1])] * 3


def test_a_rank_in_another_exchange_is_named_with_both_exchanges_on_every_rank():
    def main(mesh):
        group = mesh.group(range(3), "replica")
        group.all_gather(b"")
        try:
            if mesh.index == 2:
                group.all_reduce([1], Reduce.MAX)
            else:
                group.all_gather(b"")
        except InvariantError as error:
            return str(error)

    for seed in range(10):
        texts = run_ranks(3, main, seed)
        assert len(set(texts)) == 1
        assert "rank 2 is in all-reduce max 1 of replica[0-2]" in texts[0]
        assert "is in all-gather 1 of replica[0-2]" in texts[0]


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_skips_an_exchange_is_named(seed):
    def main(mesh):
        group = mesh.group(range(3))
        group.all_gather(b"")
        if mesh.index != 1:
            group.all_gather(b"")

    with pytest.raises(InvariantError, match=r"is in all-gather 1 of .*, but rank 1 has ended"):
        run_ranks(3, main, seed)


def test_ranks_that_wait_for_each_other_in_a_ring_are_named():
    def main(mesh):
        own = mesh.group([mesh.index, (mesh.index + 1) % 3], "own")
        mesh.group([(mesh.index - 1) % 3, mesh.index], "own")
        own.all_gather(b"")

    with pytest.raises(InvariantError) as caught:
        run_ranks(3, main)
    assert str(caught.value) == (
        "every rank waits for another: rank 0 is in all-gather 0 of own[0-1]; "
        "rank 1 is in all-gather 0 of own[1-2]; rank 2 is in all-gather 0 of own[2,0]"
    )


def test_an_exception_names_its_rank_and_ends_the_others():
    ended = {}

    def main(mesh):
        group = mesh.group(range(3))
        group.all_gather(b"")
        if mesh.index == 1:
            raise KeyError("lost")
        try:
            group.all_gather(b"")
        except PeerError as error:
            ended[mesh.index] = str(error)
            raise

    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(3, main)
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]
    assert ended == dict.fromkeys((0, 2), "rank 1 stopped: KeyError: 'lost'")


def test_a_failure_that_ranks_catch_is_theirs_to_report():
    def main(mesh):
        group = mesh.group(range(2))
        if mesh.index == 0:
            mesh.fail("told to")
        try:
            group.all_gather(b"")
        except PeerError as error:
            return str(error)

    assert run_ranks(2, main) == ["rank 0 stopped: told to"] * 2


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda g: g.all_gather_ints([0] * g.index), "member 0 gave a row of 0 ints, member 1"),
        (lambda g: g.all_gather_ints([2**63]), "64-bit ints"),
        (lambda g: g.all_reduce([2**62, 2**62], Reduce.SUM), "sum of element 0"),
        (lambda g: g.broadcast(2, b""), "member 2 of 2 cannot be a broadcast's root"),
    ],
)
def test_parts_that_do_not_fit_end_every_rank(act, text):
    def main(mesh):
        group = mesh.group(range(2))
        with pytest.raises(InvariantError, match=text):
            act(group)
        with pytest.raises(InvariantError, match=text):
            group.all_gather(b"")
        return True

    assert run_ranks(2, main) == [True, True]


def test_a_group_needs_its_rank_and_a_name_of_its_own():
    def main(mesh):
        mesh.group([0, 1])
        mesh.group([0, 1], "other")
        with pytest.raises(InvariantError, match=rf"rank {mesh.index} has a group .* already"):
            mesh.group([0, 1])
        with pytest.raises(InvariantError, match="is no member of"):
            mesh.group([1 - mesh.index])
        with pytest.raises(InvariantError, match="not distinct ranks"):
            mesh.group([0, 0, 1])

    run_ranks(2, main)


def test_thousands_of_ranks_fit_one_thread():
    size = 2048

    def main(mesh):
        world = mesh.group(range(size), "world")
        first = mesh.index // 8 * 8
        part = mesh.group(range(first, first + 8), "part")
        return world.all_reduce(part.all_reduce([mesh.index], Reduce.SUM), Reduce.MAX)

    assert run_ranks(size, main) == [[sum(range(size - 8, size))]] * size
