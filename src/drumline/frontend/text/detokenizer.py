"""Ids to text, as they come.

A stream's text is the concatenation of what `add` and `finish` return, and that
is the same however the ids are split among the calls. A character whose bytes
have not all come is held back, so no chunk ends inside one; bytes that can never
become a character turn into U+FFFD.
"""

from collections.abc import Sequence
from encodings.utf_8 import IncrementalDecoder

from drumline.frontend.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one stream of generated ids."""

    __slots__ = ("_at_start", "_pieces", "_utf8")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Decode with `tokenizer`; of special tokens that are skipped, keep those `shown`."""
        self._pieces = tokenizer.spoken(shown) if skip_special else tokenizer.pieces
        self._utf8 = IncrementalDecoder("replace")
        self._at_start = tokenizer.facts.drops_first_space

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        pieces = self._pieces
        if len(token_ids) == 1:
            data = pieces[token_ids[0]]
        else:
            data = b"".join([pieces[id_] for id_ in token_ids])
        if self._at_start or self._utf8.buffer or not data.isascii():
            return self._stripped(self._utf8.decode(data))
        return data.decode("ascii")  # in the middle of nothing

    def finish(self) -> str:
        """Return what was held back; nothing comes after it."""
        return self._stripped(self._utf8.decode(b"", True))

    def _stripped(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


def decode(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
    """Return the text of `token_ids`."""
    stream = Detokenizer(tokenizer, skip_special=skip_special)
    return stream.add(token_ids) + stream.finish()
