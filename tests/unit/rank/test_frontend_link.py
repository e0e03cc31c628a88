"""A rank is ready only when its wire is connected, and says why its link ended."""

import time

import pytest
import zmq
from tests.fakes.engine import registration

from drumline.control.transport import Transport
from drumline.core.errors import PeerError
from drumline.rank.wiring import await_frontend, check_ended
from drumline.wire.codec import encode
from drumline.wire.handshake import Addresses, Init


@pytest.fixture
def frontend():
    """A bound handshake socket, the address it has, and the context for more."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    yield socket, f"tcp://127.0.0.1:{port}", context
    context.destroy(0)


@pytest.fixture
def linked(frontend):
    link = Transport(frontend[1], registration())
    link.start()
    yield link
    link.close()


def ended(link: Transport) -> None:
    deadline = time.perf_counter() + 5
    while not link.closed:
        assert time.perf_counter() < deadline
        time.sleep(0.01)


def test_a_frontend_that_never_answers_leaves_the_rank_unready(linked):
    with pytest.raises(PeerError, match=r"did not take the registration within 0\.2 s"):
        await_frontend(linked, 0.2)


def test_a_connected_frontend_makes_it_ready_and_its_end_is_told(frontend, linked):
    socket, _, context = frontend
    identity, _hello = socket.recv_multipart()
    inputs, outputs = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (inputs, outputs)]
    bound = [[f"tcp://127.0.0.1:{port}"] for port in ports]
    addresses = Addresses(inputs=bound[0], outputs=bound[1])
    socket.send_multipart([identity, encode(Init(addresses=addresses))])
    await_frontend(linked, 10)
    check_ended(linked)
    inputs.close(0)
    ended(linked)
    with pytest.raises(PeerError, match="link to the frontend ended: the frontend is gone"):
        check_ended(linked)
    outputs.close(0)


def test_a_link_whose_thread_breaks_says_what_it_met(frontend, linked, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(Transport, "_serve", broken)
    monkeypatch.setattr(Transport, "_greeted", broken)
    link = Transport(frontend[1], registration())
    link.start()
    with pytest.raises(PeerError, match="it broke: RuntimeError: no such thing"):
        await_frontend(link, 10)
    with pytest.raises(PeerError, match="RuntimeError: no such thing"):
        check_ended(link)
    link.close()
