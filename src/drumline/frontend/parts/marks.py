"""Marks in text that comes in pieces."""


def unsure(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that may be the beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def split_at(text: str, mark: str) -> tuple[str, str, bool]:
    """Return what surely stands before `mark`, and the rest; whether the rest is what is behind it.

    If not, the rest may be its beginning. No text is held back for an empty mark.
    """
    at = text.find(mark) if mark else -1
    if at >= 0:
        return text[:at], text[at + len(mark) :], True
    kept = len(text) - unsure(text, mark)
    return text[:kept], text[kept:], False


def may_begin(text: str, mark: str) -> bool:
    """Whether `text` is less than `mark` and so far the same."""
    return len(text) < len(mark) and mark.startswith(text)


def space_before(text: str) -> int:
    """Return how much white space `text` begins with."""
    return len(text) - len(text.lstrip())
