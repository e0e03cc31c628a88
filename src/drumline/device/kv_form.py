"""How keys and values are kept in a block: which numbers they are, and in which order they lie.

It knows one layer's keys or values, a *side*; not how many layers there are, nor who has
which block.

Integers are the vector of one token and KV head, divided by a 127th of its largest value and
rounded to nearest; that step stands behind the integers of its block, a float32. One step for
each token, and not for each channel, is what KIVI (Liu et al., 2024) keeps values by, and what
lets a token be written by itself; at eight bits keys bear it too.
"""

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

LINE_BYTES = 4
"""What a token has of a line of keys, and a dimension of a line of values."""
_MOST = 127
_LEAST = 1e-30
"""Vectors without a larger value are zeros: their steps would be no normal numbers."""


class KvForm(Struct, frozen=True):
    """A form of a pool's blocks.

    In rows, a block's tokens lie one behind the other, all KV heads of each. In lines, as native
    kernels read them, each KV head's tokens lie together: a line of keys has four bytes of every
    token, and one of values four bytes of every dimension, of one token or as many as fit.
    """

    dtype: torch.dtype
    """What is kept: a float type, or int8."""
    lines: bool = False

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def has_steps(self) -> bool:
        """Whether steps stand behind the numbers."""
        return self.dtype == torch.int8

    def side_bytes(self, tokens: int, heads: int, dim: int) -> int:
        """Return how many bytes a layer's keys, or values, of a block take."""
        step_bytes = torch.float32.itemsize if self.has_steps else 0
        return tokens * heads * (dim * self.dtype.itemsize + step_bytes)

    def tag(self, tokens: int, heads: int, dim: int) -> str:
        """Return what tells bytes of this form from those of any other.

        Whoever changes how bytes are read names it here.
        """
        order = "lines of heads" if self.lines else "tokens-heads-dims"
        steps = ", float32 steps behind" if self.has_steps else ""
        return f"{order} {tokens}x{heads}x{dim} {self.name}{steps}"


class KvSide:
    """One layer's keys, or its values, in every block of a pool."""

    __slots__ = ("_dim", "_form", "_group", "_heads", "_order", "_tokens", "numbers", "steps")

    def __init__(
        self, raw: Tensor, form: KvForm, tokens: int, heads: int, dim: int, *, keys: bool
    ) -> None:
        """View `raw`, the side's bytes of each block, uint8 `[blocks, side_bytes]`, in a form."""
        self._form, self._tokens, self._heads, self._dim = form, tokens, heads, dim
        item = form.dtype.itemsize
        size = tokens * dim * item
        # Each head by itself, or all of them as one.
        parts = heads if form.lines else 1
        places = raw.view(len(raw), parts, -1)
        held = places[:, :, : size * heads // parts].view(form.dtype)
        self.steps: Tensor | None = None
        """Float32 `[blocks, tokens, heads]`, or None where numbers are floats."""
        if form.has_steps:
            steps = places[:, :, size * heads // parts :].view(torch.float32)
            self.steps = steps.transpose(1, 2) if form.lines else steps.view(-1, tokens, heads)
        self._group = 0
        """Tokens that share four bytes of a line, or 0 where they have places of their own."""
        if not form.lines:
            self.numbers = held.view(-1, tokens, heads, dim)
            """What is kept, a view: block first, then token (in two dimensions where several
            share a line's four bytes), KV head and value (in two where a token's are several)."""
            return
        several = LINE_BYTES // item
        if keys:
            lines = held.view(-1, heads, dim // several, tokens, several)
            self.numbers = lines.permute(0, 3, 1, 2, 4)
        else:
            lines = held.view(-1, heads, tokens // several, dim, several)
            self.numbers = lines.permute(0, 2, 4, 1, 3)
            self._group = several

    def write(self, blocks: Tensor, tokens: Tensor, vectors: Tensor) -> None:
        """Keep `vectors`, `[n, heads, dim]`, as those of token `tokens[i]` of block `blocks[i]`."""
        if self.steps is not None:
            kept, steps = rounded(vectors)
            self.steps[blocks, tokens] = steps
        else:
            kept = vectors.to(self.numbers.dtype)
        place: Sequence[Tensor] = (blocks, tokens)
        if self._group:
            place = (blocks, tokens // self._group, tokens % self._group)
        shape = self.numbers.shape[len(place) :]
        self.numbers[tuple(place)] = kept.reshape(-1, *shape)

    def read(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the vectors of whole blocks, `[len(blocks) * tokens, heads, dim]`."""
        vectors: Tensor = self.numbers.index_select(0, blocks).reshape(-1, self._heads, self._dim)
        if self.steps is not None:
            steps = self.steps.index_select(0, blocks).reshape(-1, self._heads, 1)
            vectors = vectors.float() * steps
        return vectors.to(dtype)


def rounded(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors as int8, and their steps, float32, `[…]` of `[…, dim]`.

    The step of what is not finite is no number, and so is whatever is read of it.
    """
    exact = vectors.float()
    largest = exact.abs().amax(-1)
    finite = largest < torch.inf
    held = finite & (largest > _LEAST)
    inverse = torch.where(held, _MOST / largest, 0.0).unsqueeze(-1)
    integers = torch.where(held.unsqueeze(-1), (exact * inverse).round(), 0.0)
    steps = torch.where(finite, torch.where(held, largest / _MOST, 0.0), torch.nan)
    return integers.to(torch.int8), steps
