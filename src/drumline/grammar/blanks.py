"""White space that goes on: JSON permits any amount of it, and small models find no end.

A grammar could count it, which makes each of its states many; a matcher counts it for
nothing. Text within a string is counted too: nobody can tell it apart by its ids.
"""

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.grammar.vocabulary import Vocabulary

MAX_BLANKS = 32
"""Characters of white space in a row, beyond which ids that hold nothing else are left out."""

_BLANK = b" \t\r\n"


class Blanks:
    """Which ids of a vocabulary are white space and nothing else. Thread: any."""

    __slots__ = ("others", "widths")

    def __init__(self, vocabulary: Vocabulary) -> None:
        # A byte each: a look-up for every token that is drawn.
        self.widths = bytes(
            min(len(piece), 255) if piece and not piece.strip(_BLANK) else 0
            for piece in vocabulary.pieces
        )
        bits = np.ones(32 * vocabulary.mask_words, np.bool_)
        bits[: vocabulary.size] = np.frombuffer(self.widths, np.uint8) == 0
        self.others: IntArray = np.packbits(bits, bitorder="little").view(np.int32)
        """A mask of all ids that hold something else."""


class BlankRun:
    """The white space that one text ends with."""

    __slots__ = ("_blanks", "_widths")

    def __init__(self, blanks: Blanks) -> None:
        self._blanks = blanks
        self._widths = [0]

    def accepted(self, token: int) -> None:
        """Note a token."""
        width = self._blanks.widths[token]
        self._widths.append(self._widths[-1] + width if width else 0)

    def rolled_back(self, tokens: int) -> None:
        """Forget the last `tokens`."""
        del self._widths[len(self._widths) - tokens :]

    def cut(self, masks: IntArray, row: int) -> None:
        """Take further white space out of a mask when there is enough, unless nothing is left."""
        if self._widths[-1] < MAX_BLANKS:
            return
        mask = masks[row]
        left = mask & self._blanks.others
        if left.any():
            mask[:] = left
