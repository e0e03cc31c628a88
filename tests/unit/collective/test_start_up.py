"""How the ranks of a mesh find each other, and who else knocks."""

import contextlib
import logging
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.meshes import TOKEN, listening

from drumline.collective import door
from drumline.collective.door import Address, Door, Purpose, hello, parse_address
from drumline.collective.mesh import join
from drumline.collective.settings import MeshSettings, Seat
from drumline.core.clock import SystemClock
from drumline.core.errors import ConfigError, PeerError

QUICK = MeshSettings(startup_timeout_s=0.6, startup_report_s=0.2)


class Arrivals:
    """Ranks that start on threads of their own, when told to."""

    def __init__(self, size, settings=QUICK):
        self.size, self.settings = size, settings
        self.listener, self.address = listening()
        self.pool = ThreadPoolExecutor(8)
        self.futures = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for future in self.futures.values():
            if future.exception() is None:
                future.result().close()
        self.pool.shutdown()
        self.listener.close()

    def start(self, index, name=None, **changes):
        seat = {"index": index, "size": self.size, "address": self.address, "token": TOKEN}
        seat |= {"node_ranks": 0}
        seat |= {key: value for key, value in changes.items() if key in seat}
        settings = changes.get("settings", self.settings)
        listener = self.listener if seat["index"] == 0 else None
        self.futures[name or index] = self.pool.submit(
            join, Seat(**seat), settings, SystemClock(), listener
        )

    def outcome(self, name):
        future = self.futures[name]
        return future.exception() or future.result()

    def knock(self, said=b""):
        host, _, port = self.address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=5)
        connection.sendall(said)
        return connection


def test_who_is_missing_is_named_to_everybody_and_reported_before(caplog):
    with caplog.at_level(logging.WARNING), Arrivals(4) as arrivals:
        for index in (0, 2):
            arrivals.start(index)
        for index in (0, 2):
            assert isinstance(arrivals.outcome(index), PeerError)
            assert "ranks 1, 3 of 4 are missing" in str(arrivals.outcome(index))
        assert str(arrivals.outcome(2)).startswith("rank 0 refused: mesh start-up: after 0.6 s")
    assert any("rank 0 waits" in m and "ranks 1, 3 of 4" in m for m in caplog.messages)


def test_the_machines_of_who_is_missing_are_named_where_there_are_several():
    with Arrivals(6) as arrivals:
        arrivals.start(0, node_ranks=2)
        arrivals.start(1, node_ranks=2)
        arrivals.start(4, node_ranks=2)
        told = str(arrivals.outcome(0))
    assert "ranks 2, 3, 5 of 6 (nodes 1, 2) are missing" in told
    free, address = listening()
    free.close()
    with pytest.raises(PeerError, match=r"rank 0 of 4 \(node 0\) cannot be reached"):
        join(Seat(2, 4, address, TOKEN, 2), QUICK, SystemClock())


def test_a_first_rank_that_never_comes_is_named():
    free, address = listening()
    free.close()
    with pytest.raises(PeerError, match=rf"rank 0 of 2 cannot be reached at {address}: .*refused"):
        join(Seat(1, 2, address, TOKEN), QUICK, SystemClock())


def test_the_first_rank_may_come_last():
    free, address = listening()
    free.close()
    with Arrivals(3, MeshSettings(startup_timeout_s=10)) as arrivals:
        arrivals.address = address
        arrivals.listener.close()
        arrivals.listener = None
        arrivals.start(2)
        arrivals.start(1)
        time.sleep(0.1)
        arrivals.start(0)
        ends = [arrivals.outcome(index) for index in range(3)]
        results = arrivals.pool.map(lambda end: end.group(range(3)).all_gather(b"x"), ends)
        assert list(results) == [[b"x"] * 3] * 3
        arrivals.listener = contextlib.closing(socket.socket()).thing


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token": b"another"}, "rank 0 refused: the token is not this mesh's"),
        ({"size": 3}, "rank 0 refused: the hello is for 3 ranks, this mesh has 2"),
        (
            {"settings": MeshSettings(startup_timeout_s=2, peer_timeout_s=1)},
            "the hello is for a beat every 100 ms, this mesh has 500",
        ),
    ],
)
def test_a_rank_of_another_mesh_is_told_why_it_is_refused(changes, text):
    with Arrivals(2, MeshSettings(startup_timeout_s=10)) as arrivals:
        arrivals.start(0)
        arrivals.start(1, "stray", **changes)
        assert text in str(arrivals.outcome("stray"))
        arrivals.start(1)
        assert arrivals.outcome(1).refused == 0
        assert arrivals.outcome(0).refused == 1


def test_a_second_process_in_the_same_seat_is_refused():
    with Arrivals(3, MeshSettings(startup_timeout_s=10)) as arrivals:
        arrivals.start(0)
        arrivals.start(1, "one")
        arrivals.start(1, "two")
        time.sleep(0.1)
        arrivals.start(2)
        outcomes = [arrivals.outcome("one"), arrivals.outcome("two")]
        refused = [str(o) for o in outcomes if isinstance(o, PeerError)]
        assert refused == ["rank 0 refused: rank 1 is here already"]
        assert arrivals.outcome(0).refused == 1


def test_garbage_and_silence_at_the_port_are_counted_and_hold_nobody_up(monkeypatch):
    monkeypatch.setattr(door, "_HELLO_TIMEOUT_S", 0.3)
    with Arrivals(3, MeshSettings(startup_timeout_s=10)) as arrivals:
        arrivals.start(0)
        good = hello(Seat(1, 3, "", b"guessed"), MeshSettings(), Purpose.LINE, Address("h", 1))
        strangers = [
            arrivals.knock(b"GET / HTTP/1.1\r\n\r\n"),
            arrivals.knock(b"\x16\x03\x01" + bytes(600)),
            arrivals.knock(b"DRUM"),  # the right beginning, and then nothing
            arrivals.knock(),  # half-open
            arrivals.knock(good),
        ]
        reset = arrivals.knock(b"DR")
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
        gone = arrivals.knock(good[:40])
        gone.close()
        start = time.perf_counter()
        arrivals.start(1)
        time.sleep(0.5)  # long enough for the silent ones to be sent away
        arrivals.start(2)
        first = arrivals.outcome(0)
        assert first.refused == 7
        assert arrivals.outcome(1).refused == arrivals.outcome(2).refused == 0
        assert time.perf_counter() - start < 4
        for stranger in strangers:
            stranger.settimeout(2)
            with contextlib.suppress(ConnectionResetError):
                assert TOKEN not in stranger.recv(4096)
            stranger.close()
        with pytest.raises(ConnectionRefusedError):
            arrivals.knock()


@given(said=st.binary(min_size=1, max_size=300), whole=st.booleans())
@settings(deadline=None, max_examples=60)
def test_no_bytes_get_in_or_break_the_door(said, whole):
    seat = Seat(0, 2, "", TOKEN)
    listener, address = listening()
    good = hello(Seat(1, 2, "", TOKEN), MeshSettings(), Purpose.LINE, Address("127.0.0.1", 1))
    with contextlib.closing(Door(listener, seat, MeshSettings(), SystemClock())) as entrance:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as stranger:
            # Either anything at all, or a good hello with a part overwritten.
            spoiled = said + good[len(said) :] if whole else said
            stranger.sendall(spoiled)
            stranger.shutdown(socket.SHUT_WR)
            guests, missing = [], set()
            while not guests and not entrance.refused:
                guests, missing = entrance.admitted({(Purpose.LINE, 1)}, 2_000)
            if spoiled[: len(good)] == good:
                assert [guest.rank for guest in guests] == [1]
                guests[0].connection.close()
            else:
                assert (guests, missing, entrance.refused) == ([], {(Purpose.LINE, 1)}, 1)


def test_a_rank_that_goes_away_during_start_up_is_named_at_once():
    with Arrivals(3, MeshSettings(startup_timeout_s=20)) as arrivals:
        arrivals.start(0)
        arrivals.start(1)
        seat = Seat(2, 3, arrivals.address, TOKEN)
        # It says hello and dies before the table comes, or right after it.
        said = hello(seat, MeshSettings(), Purpose.LINE, Address("127.0.0.1", 9))
        start = time.perf_counter()
        connection = arrivals.knock(said)
        time.sleep(0.05)
        connection.close()
        assert "rank 2 went away during start-up" in str(arrivals.outcome(0))
        assert isinstance(arrivals.outcome(1), PeerError)
        assert time.perf_counter() - start < 5


def test_an_address_in_use_is_the_operators_to_mend():
    taken, address = listening()
    with taken, pytest.raises(ConfigError, match=rf"cannot listen on {address}: .*in use"):
        join(Seat(0, 2, address, TOKEN), QUICK, SystemClock())


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "host:70000", "host:-1"])
def test_an_address_is_host_and_port(text):
    with pytest.raises(ConfigError, match="not host:port"):
        parse_address(text)


def test_addresses_read_as_they_are_written():
    assert parse_address("[::1]:80") == Address("::1", 80)
    for text in ("[::1]:80", "10.0.0.1:443", "node-3:29500"):
        assert str(parse_address(text)) == text


def test_threads_and_sockets_are_given_back():
    before = threading.active_count()
    with Arrivals(3, MeshSettings(startup_timeout_s=10)) as arrivals:
        for index in range(3):
            arrivals.start(index)
        for index in range(3):
            arrivals.outcome(index)
        assert sum(t.name == "mesh-pulse" for t in threading.enumerate()) == 3
    assert threading.active_count() == before
