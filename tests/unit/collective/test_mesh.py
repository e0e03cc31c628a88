"""Ends of a real mesh over loopback, each on a thread."""

import logging
import time

import pytest
from hypothesis import given, settings
from tests.fakes.meshes import meshes, together
from tests.fakes.programs import carry_out, expected, programs

from drumline.collective.mesh import join
from drumline.collective.settings import MeshSettings, Seat
from drumline.contract.ports import Reduce
from drumline.core.clock import SystemClock
from drumline.core.errors import ConfigError, InvariantError, PeerError


@pytest.fixture(scope="module")
def four():
    with meshes(4) as ends:
        yield ends


@pytest.fixture
def three():
    with meshes(3) as ends:
        yield ends


names = iter(range(10**9))


@given(program=programs(4))
@settings(deadline=None, max_examples=60)
def test_any_sequence_of_exchanges_gives_what_the_model_says(four, program):
    name = f"group{next(names)}-"
    results = together(four, lambda end: carry_out(end, program, name))
    assert results == [expected(program, rank) for rank in range(4)]


def test_payloads_larger_than_every_buffer_arrive_whole(three):
    def act(end):
        group = end.group(range(3))
        gathered = group.all_gather(bytes([end.index]) * 3_000_000)
        return gathered == [bytes([i]) * 3_000_000 for i in range(3)], group.all_gather(b"after")

    assert together(three, act) == [(True, [b"after"] * 3)] * 3


@pytest.mark.parametrize("sizes", [(9, 5_000_000), (5_000_000, 9), (5_000_000, 5_000_000)])
def test_two_ranks_that_swap_do_not_get_stuck_sending(sizes):
    def act(end):
        pair = end.group([1, 0])
        for n in range(30):  # the line is full of these when the swap begins
            pair.broadcast(0, b"%d" % n * 3000)
        return pair.all_gather(bytes(sizes[pair.index]))

    with meshes(2) as ends:
        assert together(ends, act) == [[bytes(size) for size in sizes]] * 2


def test_a_rank_that_runs_ahead_keeps_what_it_sent_apart(three):
    def act(end):
        group = end.group(range(3))
        if end.index:
            time.sleep(0.05 * end.index)
        return [group.broadcast(0, b"%d" % n * 5000) for n in range(40)]

    assert together(three, act) == [[b"%d" % n * 5000 for n in range(40)]] * 3


def test_a_mesh_of_one_needs_nobody():
    with join(Seat(0, 1, "", b""), MeshSettings(), SystemClock()) as mesh:
        group = mesh.group([0])
        assert group.all_gather(b"x") == [b"x"]
        assert group.all_gather_ints([1, 2]) == [[1, 2]]
        assert group.all_reduce([3], Reduce.SUM) == [3]
        assert group.broadcast(0, b"y") == b"y"


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_rank_in_another_exchange_is_named_with_both_on_every_rank(three, odd):
    def act(end):
        group = end.group(range(3), "replica")
        group.all_gather(b"")
        if end.index == odd:
            group.all_reduce([1], Reduce.MAX)
        else:
            group.all_gather(b"")

    errors = together(three, act)
    assert {type(error) for error in errors} == {InvariantError}
    assert len(set(map(str, errors))) == 1
    assert "all-reduce max 1 of replica[0-2]" in str(errors[0])
    assert "all-gather 1 of replica[0-2]" in str(errors[0])


def test_a_rank_in_another_group_is_named_with_both(three):
    def act(end):
        both = end.group([0, 1], "both") if end.index != 2 else None
        world = end.group(range(3), "world")
        (both if end.index == 0 else world).all_gather(b"")

    errors = together(three, act)
    assert len(set(map(str, errors))) == 1
    assert "rank 0 is in all-gather 0 of both[0-1]" in str(errors[0])
    assert "rank 1 is in all-gather 0 of world[0-2]" in str(errors[0])


def test_a_rank_that_skips_an_exchange_is_named(three):
    def act(end):
        group = end.group(range(3))
        other = end.group(range(3), "other")
        if end.index != 1:
            group.all_gather(b"")
        other.all_gather(b"")

    errors = together(three, act)
    assert {type(error) for error in errors} == {InvariantError}
    assert "rank 1 is in all-gather 0 of other[0-2]" in str(errors[0])


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda g: g.all_gather_ints([0] * g.index), "member 0 gave a row of 0 ints, member 1"),
        (lambda g: g.all_reduce([0] * g.index, Reduce.MAX), "a row of 0 ints, member 1"),
        (lambda g: g.all_gather_ints([2 ** (62 + g.index)]), "64-bit ints"),
        (lambda g: g.all_reduce([2**62], Reduce.SUM), "sum of element 0"),
        (lambda g: g.broadcast(3, b""), "member 3 of 3 cannot be a broadcast's root"),
    ],
)
def test_parts_that_do_not_fit_end_every_rank(three, act, text):
    def both(end):
        group = end.group(range(3))

        def to_the_end():
            act(group)
            group.all_gather(b"another rank found it")

        with pytest.raises(InvariantError, match=text):
            to_the_end()
        with pytest.raises(InvariantError, match=text):
            group.all_gather(b"")
        return True

    assert together(three, both) == [True] * 3


@pytest.mark.parametrize("large", [0, 2])
def test_a_part_above_the_limit_ends_every_rank(large):
    def act(end):
        group = end.group(range(3))
        assert group.all_gather(b"x" * 1000) == [b"x" * 1000] * 3
        group.all_gather(b"x" * (1001 if end.index == large else 1))

    with meshes(3, max_frame_bytes=1000) as ends:
        errors = together(ends, act)
    assert {str(error) for error in errors} == {
        f"rank {large} gave 1001 bytes to all-gather 1 of ranks[0-2]; "
        "an exchange takes at most 1000"
    }


def test_a_group_needs_its_rank_and_a_name_of_its_own(four):
    end = four[1]
    end.group([0, 1], "twice")
    with pytest.raises(InvariantError, match=r"has a group twice\[0-1\] already"):
        end.group([0, 1], "twice")
    with pytest.raises(InvariantError, match=r"is no member of ranks\[2-3\]"):
        end.group([2, 3])
    with pytest.raises(InvariantError, match="not distinct ranks of a mesh of 4"):
        end.group([1, 4])
    assert repr(end.group([1, 0], "shown")) == "<shown[1,0], member 0, exchange 0>"


def test_a_slow_rank_is_waited_for_and_reported(caplog):
    def act(end):
        group = end.group(range(3), "replica")
        if end.index == 2:
            time.sleep(1.0)
        return group.all_gather(b"%d" % end.index)

    with caplog.at_level(logging.WARNING), meshes(3, peer_timeout_s=0.8, wait_report_s=0.3) as ends:
        assert together(ends, act) == [[b"0", b"1", b"2"]] * 3
    report = next(line for line in caplog.messages if line.startswith("rank 0 waits"))
    assert "waits for rank 2 in all-gather 0 of replica[0-2], for 0." in report
    assert report.endswith("rank 2 is alive and busy")
    chain = next(line for line in caplog.messages if line.startswith("rank 1 waits for rank 0"))
    assert chain.endswith(
        "rank 0 is alive and itself waits for rank 2 in all-gather 0 of replica[0-2]"
    )
    # The age doubles from one report to the next.
    assert len([line for line in caplog.messages if line.startswith("rank 0 waits")]) == 2


def test_time_between_exchanges_is_no_wait(caplog):
    def act(end):
        group = end.group(range(2))
        group.all_gather(b"")
        time.sleep(0.5)
        group.all_gather(b"")

    with caplog.at_level(logging.WARNING), meshes(2, peer_timeout_s=0.5, wait_report_s=0.2) as ends:
        together(ends, act)
    assert not [line for line in caplog.messages if "waits" in line]


def test_a_rank_that_left_is_named_to_those_who_need_it(three):
    def act(end):
        group = end.group(range(3))
        group.all_gather(b"")
        if end.index == 1:
            end.close()
        else:
            group.all_gather(b"")

    first, left, other = together(three, act)
    assert left is None
    assert str(first) == (
        "rank 1 has left the mesh; rank 0 waits for rank 1 in all-gather 1 of ranks[0-2]"
    )
    assert isinstance(other, PeerError)
    assert "rank 1 has left the mesh; rank 2 waits for rank 0" in str(other)


def test_ranks_that_leave_after_the_same_exchange_disturb_nobody():
    for _ in range(5):
        with meshes(4) as ends:

            def act(end):
                group = end.group(range(4))
                for n in range(20):
                    group.all_gather(b"%d" % n)
                end.close()
                return True

            assert together(ends, act) == [True] * 4


def test_an_exception_inside_the_mesh_tells_every_rank_why(three):
    def act(end):
        with end:
            group = end.group(range(3))
            if end.index == 2:
                raise KeyError("lost")
            # Rank 1 waits for rank 0 alone; the failure reaches it all the same.
            group.all_gather(b"")

    errors = together(three, act)
    for index in (0, 1):
        assert isinstance(errors[index], PeerError)
        assert str(errors[index]).startswith("rank 2 stopped: KeyError: 'lost'; rank")


def test_a_failure_wakes_a_rank_that_waits_for_somebody_else():
    def act(end):
        start = time.perf_counter()
        if end.index == 3:
            time.sleep(0.1)
            end.fail("told to")
        elif end.index != 2:
            group = end.group([0, 1, 2])
            with pytest.raises(PeerError, match="rank 3 stopped: told to"):
                group.all_gather(b"")  # rank 2 never comes
        return time.perf_counter() - start

    with meshes(4) as ends:
        assert max(together(ends, act)) < 2


def test_a_closed_mesh_says_so(three):
    group = three[0].group(range(3))
    three[0].close()
    three[0].close()
    with pytest.raises(InvariantError, match="rank 0 has closed its mesh"):
        group.all_gather(b"")


class Interrupting(list):
    """A row during whose reading the user presses Ctrl-C."""

    def __iter__(self):
        raise KeyboardInterrupt


def test_an_interrupted_exchange_ends_the_mesh(three):
    def act(end):
        group = end.group(range(3))
        if end.index == 0:
            with pytest.raises(KeyboardInterrupt):
                group.all_gather_ints(Interrupting([1]))
        else:
            group.all_gather(b"")

    _, one, two = together(three, act)
    assert "rank 0 left all-gather of ints 0 of ranks[0-2]: KeyboardInterrupt()" in str(one)
    assert "rank 0 left all-gather of ints 0" in str(two)


@pytest.mark.parametrize(
    ("seat", "text"),
    [
        ((4, 4, "127.0.0.1:1", b"t"), "rank 4 of 4; 0 to 3 exist"),
        ((-1, 4, "127.0.0.1:1", b"t"), "rank -1 of 4"),
        ((0, 0, "127.0.0.1:1", b"t"), "0 ranks make no mesh"),
        ((0, 2, "127.0.0.1:1", b""), "every rank needs the same secret"),
    ],
)
def test_a_seat_that_cannot_be_is_refused(seat, text):
    with pytest.raises(ConfigError, match=text):
        Seat(*seat)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="mesh peer_timeout_s: 0 is not above zero"):
        MeshSettings(peer_timeout_s=0)
    assert MeshSettings().beat_s == 0.5
    assert MeshSettings(peer_timeout_s=None).quiet_s == 2.0
