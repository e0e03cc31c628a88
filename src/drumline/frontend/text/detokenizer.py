"""Ids to text, as they come.

A stream's text is the concatenation of what `add` and `finish` return, and that
is the same however the ids are split among the calls. A character whose bytes
have not all come is held back, so no chunk ends inside one; bytes that can never
become a character turn into U+FFFD.
"""

import codecs
from collections.abc import Iterable

from drumline.frontend.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one stream of generated ids."""

    __slots__ = ("_at_start", "_shown", "_skip_special", "_tokenizer", "_utf8")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Decode with `tokenizer`; of special tokens that are skipped, keep those `shown`."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        self._utf8 = _Utf8Decoder("replace")
        self._at_start = tokenizer.facts.drops_first_space

    def add(self, token_ids: Iterable[int]) -> str:
        """Return the text that these ids complete."""
        tokenizer = self._tokenizer
        piece = tokenizer.piece
        if self._skip_special:
            is_special = tokenizer.is_special
            shown = self._shown
            data = b"".join(
                [piece(id_) for id_ in token_ids if id_ in shown or not is_special(id_)]
            )
        else:
            data = b"".join(map(piece, token_ids))
        return self._stripped(self._utf8.decode(data))

    def finish(self) -> str:
        """Return what was held back; nothing comes after it."""
        return self._stripped(self._utf8.decode(b"", True))

    def _stripped(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


def decode(tokenizer: Tokenizer, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
    """Return the text of `token_ids`."""
    stream = Detokenizer(tokenizer, skip_special=skip_special)
    return stream.add(token_ids) + stream.finish()
