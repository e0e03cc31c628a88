"""A group whose members are threads that meet at their exchanges."""

import threading
from concurrent.futures import ThreadPoolExecutor

from drumline.contract.ports import Reduce


class Members:
    """The meeting place of `size` seats."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=5)
        self.given = [None] * size
        self.seats = [Seat(self, index) for index in range(size)]

    def all(self, acts):
        """Let every member act at once; returns results or errors in member order.

        Members that would wait for one that failed give up after a while.
        """
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(act) for act in acts]
        return [future.exception() or future.result() for future in futures]


class Seat:
    """One member's end of the group."""

    def __init__(self, members, index):
        self.members, self.index, self.size = members, index, members.size

    def _gather(self, value):
        self.members.given[self.index] = value
        self.members.barrier.wait()
        gathered = list(self.members.given)
        self.members.barrier.wait()
        return gathered

    def all_gather(self, payload):
        return self._gather(payload)

    def all_gather_ints(self, row):
        return self._gather(list(row))

    def all_reduce(self, values, how):
        fold = {Reduce.MIN: min, Reduce.MAX: max, Reduce.SUM: sum}[how]
        return [fold(column) for column in zip(*self._gather(list(values)), strict=True)]

    def broadcast(self, root, payload):
        return self._gather(payload)[root]
