"""The tokens that pool rows have read, for models that look back on tokens themselves.

Thread: forward thread only.
"""

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from drumline.contract.arrays import IntArray
from drumline.contract.ports import HistorySeeds
from drumline.device.staging import all_on_device, on_device

NO_TOKEN = -1
"""Stands where a window reaches to before the prompt."""


class TokenHistory:
    """A row of tokens for each pool row, each token at its own position.

    What stands before a seed's start is unspecified, and must not be read.
    """

    __slots__ = ("_device", "tokens")

    def __init__(self, rows: int, context_tokens: int, device: torch.device | None = None) -> None:
        """Make an empty history on a device, a CPU by default."""
        self._device = device or torch.device("cpu")
        size = rows, context_tokens + 1
        self.tokens = torch.zeros(size, dtype=torch.int64, device=self._device)
        """`[rows, positions]`"""

    def seed(self, seeds: HistorySeeds) -> None:
        """Give rows of new owners what they have read before their first forward."""
        counts = seeds.prefix_lengths - seeds.starts
        firsts = np.cumsum(counts) - counts
        places = np.arange(len(seeds.tokens)) + np.repeat(seeds.starts - firsts, counts)
        rows, columns, tokens = all_on_device(
            self._device,
            np.repeat(seeds.rows, counts).astype(np.int64),
            places.astype(np.int64),
            seeds.tokens,
        )
        self.tokens[rows, columns] = tokens.to(torch.int64)

    def append(
        self, rows: IntArray, lengths: IntArray, positions: Tensor, ids: Tensor
    ) -> "ReadTokens":
        """Add what a batch feeds, `ids` at `positions`; returns what its model may read.

        The ids are the device's own, so that a forward need not wait for those before it.
        """
        token_rows = on_device(self._device, np.repeat(rows, lengths).astype(np.int64))
        self.tokens[token_rows, positions] = ids
        return ReadTokens(self.tokens, token_rows, positions)


class ReadTokens(Struct, frozen=True, eq=False):
    """What the tokens of one batch may look back on."""

    tokens: Tensor
    """`[rows, positions]`"""
    rows: Tensor
    """The row of each token of the batch, `[tokens]`."""
    positions: Tensor

    def windows(self, size: int) -> Tensor:
        """Return the `size` tokens before each one, the nearest first, `[tokens, size]`."""
        before = torch.arange(size, device=self.positions.device)
        places = self.positions.unsqueeze(1) - 1 - before
        found = self.tokens[self.rows.unsqueeze(1), places.clamp(min=0)]
        return found.where(places >= 0, NO_TOKEN)
