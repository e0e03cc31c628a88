"""A group of one: every exchange returns what its only member gave."""

from collections.abc import Sequence

from drumline.contract.ports import Reduce


class SoloGroup:
    """The group of a rank that is alone."""

    index = 0
    size = 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return [list(row)]

    def all_reduce(self, values: Sequence[int], how: Reduce) -> list[int]:
        return list(values)

    def broadcast(self, root: int, payload: bytes) -> bytes:
        return payload
