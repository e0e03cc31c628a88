"""The parts of an answer, each as it grows."""

from msgspec import Struct


class Reasoning(Struct, frozen=True):
    """Text with which a model thinks before it answers."""

    text: str


class Words(Struct, frozen=True):
    """Text of the answer itself."""

    text: str


class CallBegun(Struct, frozen=True):
    """The answer calls a tool; the first of its calls is 0."""

    call: int
    name: str


class Arguments(Struct, frozen=True):
    """What a call's arguments grow by: a piece of JSON's text."""

    call: int
    text: str


Part = Reasoning | Words | CallBegun | Arguments


def joined(parts: list[Part]) -> list[Part]:
    """Return `parts` with neighbours that continue each other as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        match last, part:
            case Words(before), Words(text):
                found[-1] = Words(before + text)
            case Reasoning(before), Reasoning(text):
                found[-1] = Reasoning(before + text)
            case Arguments(call, before), Arguments(same, text) if call == same:
                found[-1] = Arguments(call, before + text)
            case _:
                found.append(part)
    return found
