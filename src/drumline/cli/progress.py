"""What is being waited for, as one line on a terminal."""

import sys

_CLEAR = "\r\x1b[K"


class Progress:
    """One line on a terminal's standard error that says what is being waited for."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def at(self, step: str) -> None:
        """Show a step in place of the last one."""
        if self._terminal:
            print(f"{_CLEAR}{step} …", end="", file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        """Say something that stays."""
        if self._terminal:
            print(f"{_CLEAR}{line}", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Take the line away."""
        if self._terminal:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
