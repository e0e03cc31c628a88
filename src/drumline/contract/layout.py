"""Which rank stands where: the arithmetic that launcher and ranks share.

Ranks are numbered replica by replica, within a replica stage by stage, and within a stage by
their tensor-parallel place.
"""

from typing import Self

from msgspec import Struct

from drumline.core.config import ParallelConfig


class Layout(Struct, frozen=True):
    """An engine of `data` replicas of `pipeline` stages of `tensor` ranks each."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Self:
        """Return the layout that an operator chose."""
        return cls(
            parallel.tensor_parallel_size,
            parallel.data_parallel_size,
            parallel.pipeline_parallel_size,
        )

    @property
    def size(self) -> int:
        return self.members * self.data

    @property
    def members(self) -> int:
        """How many ranks a replica has."""
        return self.tensor * self.pipeline

    def tensor_index(self, rank: int) -> int:
        """Return a rank's place in its stage."""
        return rank % self.tensor

    def stage_index(self, rank: int) -> int:
        """Return which stage of its replica a rank is of; the last one samples."""
        return rank // self.tensor % self.pipeline

    def leads(self, rank: int) -> bool:
        """Whether a rank is its replica's first, which holds the frontend's link."""
        return rank % self.members == 0

    def data_index(self, rank: int) -> int:
        """Return which replica a rank is of: its engine index on the frontend's wire."""
        return rank // self.members

    def replica(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that run the same scheduler as `rank`, itself included."""
        first = rank - rank % self.members
        return tuple(range(first, first + self.members))

    def stage(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same layers together, itself included."""
        first = rank - self.tensor_index(rank)
        return tuple(range(first, first + self.tensor))

    def line(self, rank: int) -> tuple[int, ...]:
        """Return the ranks at the same place of every stage of the replica, in stage order."""
        replica = self.replica(rank)
        return replica[self.tensor_index(rank) :: self.tensor]

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks at the same place of every replica, itself included."""
        return tuple(range(rank % self.members, self.size, self.members))

    def leader(self, data_index: int) -> int:
        """Return a replica's first rank, which holds the frontend's link."""
        return data_index * self.members

    def name(self, rank: int) -> str:
        """Return how a rank is called in process lists: `rank3_tp1_dp1`."""
        parts = [f"rank{rank}"]
        if self.pipeline > 1:
            parts.append(f"pp{self.stage_index(rank)}")
        if self.tensor > 1:
            parts.append(f"tp{self.tensor_index(rank)}")
        if self.data > 1:
            parts.append(f"dp{self.data_index(rank)}")
        return "_".join(parts)
