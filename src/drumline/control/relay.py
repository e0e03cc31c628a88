"""What a replica's members tell each other at a round's start, in one exchange.

The first member gives its messages, its stop request and its clock; every member
gives the digest of its previous round. Members that ran different rounds stop here,
before the plan that would follow from the difference reaches a device.

It does not know what the messages ask for, nor what a round did: whoever calls adds
to the digest.
"""

import struct
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
from msgspec import Struct
from msgspec.structs import astuple
from xxhash import xxh3_64_intdigest

from drumline.contract.arrays import IntArray, encode_array
from drumline.contract.messages import Message, decode_messages, encode_messages
from drumline.contract.plan import Plan
from drumline.contract.ports import Group
from drumline.contract.result import ForwardResult
from drumline.control.records import Digest
from drumline.core.errors import InvariantError

# A number of all bytes so far: the second argument is what came before. Arrays are read in
# place; the types of Python 3.11 do not know that they are buffers.
_mixed = cast("Callable[[IntArray | bytes, int], int]", xxh3_64_intdigest)

_encode_op = msgspec.msgpack.Encoder(enc_hook=encode_array).encode

_DIGEST = struct.Struct("<7Q")
_CLOCK = struct.Struct("<Q?")
"""Clock in µs, stop request; stands behind the digest, and messages follow."""
_BODY_AT = _DIGEST.size + _CLOCK.size
_NO_MESSAGES = encode_messages(())
MOST_BYTES = 64 * 1024 * 1024
"""Of messages in one exchange, unless a single one is larger: what one exchange carries is
bounded, and what a frontend sends while a forward runs is not."""


class Relayed(Struct, frozen=True):
    """What a round starts from, the same on every member."""

    stop: bool
    now_us: int
    messages: tuple[Message, ...]


class Relay:
    """The exchange at a round's head, and the digest of the round that runs.

    `members` are the ranks of the replica, as an operator knows them.
    """

    def __init__(self, replica: Group, members: Sequence[int] = ()) -> None:
        self._replica = replica
        self._members = tuple(members) or tuple(range(replica.size))
        self._last = _DIGEST.pack(*(0,) * len(Digest.__struct_fields__))
        self._round = 0
        self._held: tuple[Message, ...] = ()
        """Messages for which the exchanges so far had no room; they go first."""
        self._inputs = 0
        self._rows = 0
        self._lengths = 0
        self._blocks = 0
        self._requests = 0
        self._results = 0
        self._known: tuple[IntArray, IntArray] | None = None
        self._known_rows = 0
        self._known_lengths = 0

    @property
    def round(self) -> int:
        """The round that runs, counted from 1."""
        return self._round

    @property
    def owner(self) -> bool:
        """Whether this member holds the frontend's link."""
        return self._replica.index == 0

    def exchange(self, messages: tuple[Message, ...], stop: bool, now_us: int) -> Relayed:
        """Return the first member's messages, stop request and clock; the others' are ignored.

        Messages that are too many bytes for one exchange come from the next ones, in order.

        Collective: every member of the replica, once a round. Raises InvariantError on
        every member alike if their previous rounds differ.
        """
        self._round += 1
        if self._replica.size == 1:
            return Relayed(stop, now_us, messages)
        last = self._last
        body = b""
        if self.owner:
            messages, body = self._packed(messages)
        gathered = self._replica.all_gather(last + _CLOCK.pack(now_us, stop) + body)
        for payload in gathered:
            if not payload.startswith(last):
                raise self._differs(gathered)
        first = gathered[0]
        now_us, stop = _CLOCK.unpack_from(first, _DIGEST.size)
        body = first[_BODY_AT:]
        self._inputs = _mixed(body, now_us & 0xFFFFFFFFFFFFFFFF)
        if not self.owner:
            messages = () if body == _NO_MESSAGES else decode_messages(body)
        return Relayed(stop, now_us, messages)

    def _packed(self, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], bytes]:
        """Return the messages that go with this exchange, and their bytes; hold the others."""
        if self._held:
            messages = self._held + messages
            self._held = ()
        if not messages:
            return (), _NO_MESSAGES
        body = encode_messages(messages)
        count = len(messages)
        while len(body) > MOST_BYTES and count > 1:
            count = max(1, count * MOST_BYTES // len(body))
            body = encode_messages(messages[:count])
        self._held = messages[count:]
        return messages[:count], body

    def add_plan(self, plan: Plan) -> None:
        """Count a plan towards this round's digest."""
        batch = plan.batch
        if batch is not None:
            known = self._known
            # The scheduler hands out the same arrays while its batch lasts.
            if known is None or known[0] is not batch.rows or known[1] is not batch.input_lengths:
                self._known = (batch.rows, batch.input_lengths)
                self._known_rows = _mixed(batch.generations, _mixed(batch.rows, 0))
                self._known_lengths = _mixed(batch.input_lengths, 0)
            self._rows = self._known_rows
            self._lengths = _mixed(batch.prefix_lengths, self._known_lengths)
            if batch.extends:
                self._lengths = _mixed_all(self._lengths, batch.extend_ids, batch.prompt_lengths)
        digest = 0
        for patch in plan.patches:
            digest = _mixed_all(digest, patch.rows, patch.columns, patch.blocks)
        for zeroes in plan.zeroes:
            digest = _mixed(zeroes.blocks, digest)
        for copies in plan.copies:
            digest = _mixed_all(digest, copies.sources, copies.targets)
        for op in plan.cache_ops:
            digest = _mixed(_encode_op(op), digest)
        self._blocks = digest
        digest = 0
        for bound in plan.bound:
            digest = _mixed(bound.rid.encode(), digest ^ bound.row)
        for abort in plan.aborts:
            digest = _mixed(abort.rid.encode(), digest)
        self._requests = digest

    def add_result(self, result: ForwardResult) -> None:
        """Count a committed forward towards this round's digest."""
        self._results = _mixed(result.tokens, _mixed(result.counts, self._results))
        for kind, faulty in enumerate(
            (result.nan_indices, result.grammar_faults, result.stuck, result.processor_faults), 1
        ):
            if len(faulty):
                # Whose request ends is not all: each kind ends it in another way.
                self._results = _mixed(faulty, self._results ^ kind)

    def close(self) -> Digest:
        """End the round; the next exchange carries its digest."""
        digest = Digest(
            self._round,
            self._inputs,
            self._rows,
            self._lengths,
            self._blocks,
            self._requests,
            self._results,
        )
        if self._replica.size > 1:
            self._last = _DIGEST.pack(*astuple(digest))
        self._inputs = self._rows = self._lengths = self._results = 0
        return digest

    def _differs(self, gathered: Sequence[bytes]) -> InvariantError:
        """Return the error that names the first member and field that differ from the first's.

        A member can only differ in its previous round: it would have stopped before.
        """
        digests = [_DIGEST.unpack_from(payload) for payload in gathered]
        first = digests[0]
        member = next(i for i, digest in enumerate(digests) if digest != first)
        theirs = digests[member]
        field, ours, other = next(
            (name, mine, yours)
            for name, mine, yours in zip(Digest.__struct_fields__, first, theirs, strict=True)
            if mine != yours
        )
        return InvariantError(
            f"the replica's ranks ran different rounds: in round {first[0]}, rank "
            f"{self._members[member]} has {field} {other:#x} where rank {self._members[0]} "
            f"has {ours:#x}"
        )


def _mixed_all(digest: int, *arrays: IntArray) -> int:
    for array in arrays:
        digest = _mixed(array, digest)
    return digest
