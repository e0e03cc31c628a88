"""What bytes a token's piece stands for.

A vocabulary writes its pieces in one of two alphabets: byte-level ones spell every
byte with a printable character; SentencePiece's spell a space as U+2581 and bytes
without a piece of their own as `<0xNN>`. It knows no ids and no library.
"""

import re
from enum import StrEnum


class Alphabet(StrEnum):
    """How a vocabulary spells bytes."""

    BYTE_LEVEL = "byte_level"
    SPACE_MARKS = "space_marks"


_SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[str, int]:
    # Printable Latin-1 stands for itself, everything else for 256, 257, … in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    letters.update((chr(256 + index), byte) for index, byte in enumerate(others))
    return letters


_BYTE_LETTERS = _byte_letters()
_LETTERS = {byte: letter for letter, byte in _BYTE_LETTERS.items()}


def byte_piece(byte: int) -> str:
    """Return how the byte-level alphabet spells `byte`."""
    return _LETTERS[byte]


def piece_bytes(piece: str, alphabet: Alphabet) -> bytes:
    """Return the bytes that `piece` stands for."""
    if alphabet is Alphabet.BYTE_LEVEL:
        try:
            return bytes([_BYTE_LETTERS[letter] for letter in piece])
        except KeyError:  # a token added as plain text
            return piece.encode()
    byte = _BYTE_PIECE.fullmatch(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    return piece.replace(_SPACE_MARK, " ").encode()
