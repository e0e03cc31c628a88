"""JSON as models write it: with line breaks and other control characters in strings.

JSON has them escaped there, and clients' parsers insist on it.
"""

import json
import re
from typing import NoReturn

_CONTROL = re.compile(r"[\x00-\x1f]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def inside_string(text: str) -> str:
    """Return a piece of a string's inside with its control characters escaped."""
    return _CONTROL.sub(_escape, text)


def inside_strings(text: str) -> str:
    """Return a JSON text with the control characters in its strings escaped."""
    if _CONTROL.search(text) is None:
        return text
    return _STRING.sub(lambda found: inside_string(found[0]), text)


def no_number(name: str) -> NoReturn:
    """Refuse what Python reads as a number, and JSON has no word for."""
    raise ValueError(f"{name} is no number")


def _escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
