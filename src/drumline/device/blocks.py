"""How many tokens a layer is given at a time: all of a batch, or blocks of one size.

What a kernel makes of a row may depend, in its last bits, on how many rows there are.
Given blocks of one shape, and no other, it makes the same of a row in any batch.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_ROWS = 16
"""Rows of a block. A token alone costs as much as these; fewer make long prompts slow."""

Part = Callable[..., tuple[Tensor, ...]]
"""Maps tensors of one number of rows to tensors of as many."""


class Apportioned(Protocol):
    """A way to run a part of a model over the tokens of a batch."""

    def __call__(self, part: Part, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return what `part` makes of `inputs`, which have a row for each token."""


def whole(part: Part, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Run a part over all rows at once."""
    return part(*inputs)


def in_blocks(part: Part, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Run a part over blocks of `BLOCK_ROWS` rows; the last is filled up with zeros."""
    rows = len(inputs[0])
    if not rows:
        return part(*inputs)
    made = []
    for start in range(0, rows, BLOCK_ROWS):
        block = [_filled(x[start : start + BLOCK_ROWS]) for x in inputs]
        made.append(part(*block))
    return tuple(torch.cat(outputs)[:rows] for outputs in zip(*made, strict=True))


def _filled(x: Tensor) -> Tensor:
    missing = BLOCK_ROWS - len(x)
    # Contiguous in any case: a kernel may choose its way by that as well.
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x.contiguous()
