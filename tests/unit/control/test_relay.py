import numpy as np
import pytest
from tests.fakes.members import Members

from drumline.collective.solo import SoloGroup
from drumline.contract.messages import AbortAsked, Submitted
from drumline.contract.plan import Batch, Plan
from drumline.contract.request import GenerateRequest
from drumline.contract.result import ForwardResult
from drumline.control.relay import Relay
from drumline.core.errors import InvariantError


@pytest.fixture
def pair():
    return Pair()


class Pair:
    """Two members' relays."""

    def __init__(self):
        self.members = Members(2)
        self.relays = [Relay(seat) for seat in self.members.seats]


def exchange(pair, messages=(), stop=False, now_us=5):
    """Exchange; what member 1 gives besides its digest must not count."""
    first, second = pair.relays
    return pair.members.all(
        [lambda: first.exchange(messages, stop, now_us), lambda: second.exchange((), True, 99)]
    )


def test_the_first_members_word_counts_for_all(pair):
    ids = np.array([1, 2, 3], np.int32)
    messages = (Submitted(GenerateRequest(rid="a", input_ids=ids)), AbortAsked(("b",)))
    mine, theirs = exchange(pair, messages)
    assert (theirs.stop, theirs.now_us) == (mine.stop, mine.now_us) == (False, 5)
    assert theirs.messages[0].request.rid == "a"
    assert list(theirs.messages[0].request.input_ids) == [1, 2, 3]
    assert theirs.messages[1] == AbortAsked(("b",))


def test_messages_too_many_for_one_exchange_come_in_the_next_in_order(pair, monkeypatch):
    monkeypatch.setattr("drumline.control.relay.MOST_BYTES", 3000)
    ids = np.arange(100, dtype=np.int32)
    sent = [Submitted(GenerateRequest(rid=f"r{n}", input_ids=ids)) for n in range(40)]
    # One that is too large by itself goes alone.
    sent[7] = Submitted(GenerateRequest(rid="large", input_ids=np.arange(2000, dtype=np.int32)))
    came, rounds = [], 0
    for messages in (tuple(sent), (AbortAsked(("r0",)),), *[()] * 40):
        mine, theirs = exchange(pair, messages)
        assert len(mine.messages) == len(theirs.messages)
        came += theirs.messages
        rounds += bool(mine.messages)
        for relay in pair.relays:
            relay.close()
    assert [message.request.rid for message in came[:-1]] == [one.request.rid for one in sent]
    assert came[-1] == AbortAsked(("r0",))
    assert 7 <= rounds < 20


def test_members_that_ran_the_same_round_go_on(pair):
    for round_ in range(1, 4):
        exchange(pair)
        for relay in pair.relays:
            relay.add_plan(plan(round_, rows=[1, 2]))
            relay.add_result(result(7, 8))
            relay.close()
    assert [relayed.now_us for relayed in exchange(pair, now_us=8)] == [8, 8]


def plan(round_, rows):
    rows = np.array(rows, np.int32)
    batch = Batch(rows=rows, generations=rows, input_lengths=rows, prefix_lengths=rows)
    return Plan(round=round_, batch=batch)


def result(*tokens, **faulty):
    return ForwardResult(
        tokens=np.array(tokens, np.int32), counts=np.ones(len(tokens), np.int32), **faulty
    )


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        ((plan(1, [1, 3]), result(7, 8)), "rows"),
        ((plan(1, [1, 2]), result(7, 9)), "results"),
    ],
)
def test_a_member_that_ran_another_round_stops_both_with_the_field_that_differs(
    pair, theirs, field
):
    exchange(pair)
    ran = [(plan(1, [1, 2]), result(7, 8)), theirs]
    for relay, (planned, resulted) in zip(pair.relays, ran, strict=True):
        relay.add_plan(planned)
        relay.add_result(resulted)
    mine, other = (getattr(relay.close(), field) for relay in pair.relays)
    said = f"in round 1, rank 1 has {field} {other:#x} where rank 0 has {mine:#x}"
    for error in exchange(pair):
        assert isinstance(error, InvariantError)
        assert said in str(error)


def test_every_way_in_which_a_row_ends_makes_another_round_of_it():
    one = np.array([1], np.int32)
    kinds = ("nan_indices", "grammar_faults", "stuck", "processor_faults")
    digests = set()
    for ran in (result(7, 8), *(result(7, 8, **{kind: one}) for kind in kinds)):
        relay = Relay(SoloGroup())
        relay.add_result(ran)
        digests.add(relay.close().results)
    assert len(digests) == 1 + len(kinds)


def test_a_member_that_skipped_a_round_is_named(pair):
    exchange(pair)
    pair.relays[0].close()
    for error in exchange(pair):
        assert "rank 1 has round 0x0 where rank 0 has 0x1" in str(error)


def test_a_group_of_one_relays_without_encoding():
    relay = Relay(SoloGroup())
    messages = (AbortAsked(("a",)),)
    assert relay.exchange(messages, True, 3).messages is messages
    assert relay.close().round == 1
