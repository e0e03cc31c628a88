"""Reading a socket on the event loop: all messages, in order, and no loop held up."""

import asyncio
import contextlib
import itertools

import pytest
import uvloop
import zmq

from drumline.client.inbox import Inbox


class Pair:
    """Two ends of a pipe, and what came out of it."""

    def __init__(self, take=None):
        self.context = zmq.Context()
        self.near = self.context.socket(zmq.PULL)
        self.near.set_hwm(0)
        port = self.near.bind_to_random_port("tcp://127.0.0.1")
        self.far = self.context.socket(zmq.PUSH)
        self.far.set_hwm(0)
        self.far.connect(f"tcp://127.0.0.1:{port}")
        self.came = []
        self.broke = []
        self.take = take or self.came.append
        self.inbox = None

    def read(self):
        self.inbox = Inbox(self.near, self.take, self.broke.append)

    def close(self):
        if self.inbox is not None:
            self.inbox.close()
            self.inbox.close()
        self.near.close(0)
        self.far.close(0)
        self.context.term()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    """Run a test on either of the loops that a client may live on."""

    def on_a_loop(test, take=None):
        pair = Pair(take)
        with asyncio.Runner(loop_factory=request.param) as runner, contextlib.closing(pair):
            runner.run(asyncio.wait_for(test(pair), 30))

    return on_a_loop


async def until(fact):
    while not fact():  # noqa: ASYNC110 - there is nothing to wait for
        await asyncio.sleep(0.001)


def test_messages_come_in_order_those_that_were_there_before_first(run):
    async def test(pair):
        for number in range(50):
            pair.far.send(b"%d" % number)
        await asyncio.sleep(0.1)
        pair.read()
        for number in range(50, 500):
            pair.far.send(b"%d" % number)
            if number % 7 == 0:
                await asyncio.sleep(0)
        await until(lambda: len(pair.came) == 500)
        assert pair.came == [b"%d" % number for number in range(500)]

    run(test)


def test_one_message_at_a_time_is_never_left_lying(run):
    async def test(pair):
        pair.read()
        for number in range(300):
            pair.far.send(b"%d" % number)
            await until(lambda number=number: len(pair.came) == number + 1)

    run(test)


def test_a_message_that_arrives_while_one_is_taken_is_taken_too(run):
    pairs = []

    def take(message):
        pairs[0].came.append(message)
        if len(pairs[0].came) < 100:
            pairs[0].far.send(b"next")
            # Long enough to have arrived before the descriptor could be asked again.
            pairs[0].near.poll(1000)

    async def test(pair):
        pairs.append(pair)
        pair.read()
        pair.far.send(b"first")
        await until(lambda: len(pair.came) == 100)

    run(test, take)


def test_a_flood_leaves_turns_of_the_loop_to_others(run):
    async def test(pair):
        for _ in range(200):
            pair.far.send(b"x")
        await asyncio.sleep(0.1)
        pair.read()
        seen = []
        while len(pair.came) < 200:
            seen.append(len(pair.came))
            await asyncio.sleep(0)
        assert max(later - earlier for earlier, later in itertools.pairwise(seen)) <= 2

    run(test)


def test_only_the_first_frame_of_a_message_counts(run):
    async def test(pair):
        pair.read()
        pair.far.send_multipart([b"first", b"second"])
        pair.far.send(b"third")
        await until(lambda: len(pair.came) == 2)
        assert pair.came == [b"first", b"third"]

    run(test)


def test_what_the_taker_raises_is_told_and_ends_the_reading(run):
    def take(message):
        raise LookupError(message.decode())

    async def test(pair):
        pair.read()
        pair.far.send(b"no such thing")
        pair.far.send(b"nor this")
        await until(lambda: pair.broke)
        await asyncio.sleep(0.1)
        assert [str(error) for error in pair.broke] == ["no such thing"]

    run(test, take)


def test_a_taker_may_close_the_inbox(run):
    pairs = []

    def take(message):
        pairs[0].came.append(message)
        pairs[0].inbox.close()

    async def test(pair):
        pairs.append(pair)
        pair.read()
        pair.far.send(b"last")
        pair.far.send(b"later")
        await until(lambda: pair.came)
        await asyncio.sleep(0.1)
        assert pair.came == [b"last"]
        assert not pair.broke

    run(test, take)


def test_nothing_is_handed_over_once_it_is_closed_in_the_middle_of_a_flood(run):
    async def test(pair):
        for number in range(50):
            pair.far.send(b"%d" % number)
        await asyncio.sleep(0.1)
        pair.read()
        # As where the descriptor tells of something, another peer say, while a turn is due.
        pair.inbox._turn()
        pair.inbox.close()
        taken = len(pair.came)
        await asyncio.sleep(0.05)
        assert len(pair.came) == taken < 50
        assert not pair.broke

    run(test)
