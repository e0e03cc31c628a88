"""What a replica's members tell each other at a round's start, in one exchange.

The first member gives its messages, its stop request and its clock; every member
gives the digest of its previous round. Members that ran different rounds stop here,
before the plan that would follow from the difference reaches a device.

It does not know what the messages ask for, nor what a round did: whoever calls adds
to the digest.
"""

import struct
import zlib

from msgspec import Struct

from drumline.contract.arrays import IntArray
from drumline.contract.messages import Message, decode_messages, encode_messages
from drumline.contract.plan import Plan
from drumline.contract.ports import Group
from drumline.contract.result import ForwardResult
from drumline.core.errors import InvariantError

_HEAD = struct.Struct("<QIIIQ?")
"""Digest (round, inputs, plan, results), clock in µs, stop request; messages follow."""


class Digest(Struct, frozen=True):
    """A round in four numbers, the same on every member of a replica."""

    round: int = 0
    inputs: int = 0
    plan: int = 0
    results: int = 0


class Relayed(Struct, frozen=True):
    """What a round starts from, the same on every member."""

    stop: bool
    now_us: int
    messages: tuple[Message, ...]


class Relay:
    """The exchange at a round's head, and the digest of the round that runs."""

    def __init__(self, replica: Group) -> None:
        self._replica = replica
        self._last = Digest()
        self._round = 0
        self._inputs = 0
        self._plan = 0
        self._results = 0
        self._rows: IntArray | None = None
        self._rows_digest = 0

    @property
    def owner(self) -> bool:
        """Whether this member holds the frontend's link."""
        return self._replica.index == 0

    def exchange(self, messages: tuple[Message, ...], stop: bool, now_us: int) -> Relayed:
        """Return the first member's messages, stop request and clock; the others' are ignored.

        Collective: every member of the replica, once a round. Raises InvariantError on
        every member alike if their previous rounds differ.
        """
        last = self._last
        self._round = last.round + 1
        if self._replica.size == 1:
            return Relayed(stop, now_us, messages)
        body = encode_messages(messages) if self.owner else b""
        head = _HEAD.pack(last.round, last.inputs, last.plan, last.results, now_us, stop)
        gathered = self._replica.all_gather(head + body)
        heads = [_HEAD.unpack_from(payload) for payload in gathered]
        _agreed([Digest(*fields[:4]) for fields in heads])
        now_us, stop = heads[0][4:]
        body = gathered[0][_HEAD.size :]
        self._inputs = zlib.crc32(body, now_us & 0xFFFFFFFF)
        return Relayed(stop, now_us, messages if self.owner else decode_messages(body))

    def add_plan(self, plan: Plan) -> None:
        """Count a plan towards this round's digest."""
        digest = plan.round & 0xFFFFFFFF
        batch = plan.batch
        if batch is not None:
            if batch.rows is not self._rows:
                # The scheduler hands out the same arrays while its batch lasts.
                self._rows = batch.rows
                self._rows_digest = _crc(0, batch.rows, batch.generations)
            digest = _crc(digest ^ self._rows_digest, batch.input_lengths, batch.prefix_lengths)
            if batch.extends:
                digest = _crc(digest, batch.extend_ids, batch.prompt_lengths)
        for patch in plan.patches:
            digest = _crc(digest, patch.rows, patch.columns, patch.blocks)
        for zeroes in plan.zeroes:
            digest = _crc(digest, zeroes.blocks)
        for copies in plan.copies:
            digest = _crc(digest, copies.sources, copies.targets)
        for bound in plan.bound:
            digest = zlib.crc32(bound.rid.encode(), digest ^ bound.row)
        for abort in plan.aborts:
            digest = zlib.crc32(abort.rid.encode(), digest)
        self._plan = digest

    def add_result(self, result: ForwardResult) -> None:
        """Count a committed forward towards this round's digest."""
        self._results = _crc(self._results, result.counts, result.tokens, result.nan_indices)

    def close(self) -> Digest:
        """End the round; the next exchange carries its digest."""
        self._last = Digest(self._round, self._inputs, self._plan, self._results)
        self._inputs = self._plan = self._results = 0
        return self._last


def _crc(digest: int, *arrays: IntArray) -> int:
    for array in arrays:
        digest = zlib.crc32(array.data, digest)
    return digest


def _agreed(digests: list[Digest]) -> None:
    """Raise InvariantError naming the first member and field that differ from the first member's.

    A member can only differ in its previous round: it would have stopped before.
    """
    first = digests[0]
    for member, digest in enumerate(digests):
        if digest == first:
            continue
        field = next(
            name
            for name in Digest.__struct_fields__
            if getattr(digest, name) != getattr(first, name)
        )
        raise InvariantError(
            f"the replica's members ran different rounds: in round {first.round}, member {member} "
            f"has {field} {getattr(digest, field):#x} where member 0 has "
            f"{getattr(first, field):#x}"
        )
