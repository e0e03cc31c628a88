"""Structs of choices, seen as a flat list of settings.

A field anywhere in a tree of structs is a setting under its own name, unique over
the tree. Command line, environment, file and keyword arguments are all read
through this, so that a field added to a struct is known to each of them.

It knows no setting by name: descriptions, aliases and limits are the structs' own.
"""

import types
import typing
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from drumline.core.errors import ConfigError

T = TypeVar("T", bound=Struct)
Place = tuple[str, ...]


_NO = {
    int: "is no whole number, written out in digits",
    float: "is no number",
    bool: "is neither true nor false",
}
"""What to say of a word that names no value of a type at all."""


class Arity(StrEnum):
    """How many words say a setting's value."""

    SWITCH = "none"
    ONE = "one"
    MANY = "one or more"


class Setting(Struct, frozen=True, kw_only=True):
    """One field, and how it is spelled."""

    place: Place
    """The names that lead to the field from the tree's root."""
    kind: Any
    """The field's annotation, which checks and converts what was said."""
    arity: Arity
    group: str
    """What the struct that holds the field is about."""
    help: str
    default: Any
    choices: tuple[str, ...] = ()
    names: tuple[str, ...]
    """Its spellings as a flag; the first is its own, the others users of other engines know."""
    off: tuple[str, ...] = ()
    """Spellings that switch it off."""

    @property
    def field(self) -> str:
        return self.place[-1]

    @property
    def name(self) -> str:
        return self.names[0]


def settings_of(owner: type[Struct]) -> tuple[Setting, ...]:
    """Return the fields of a struct and of the structs within it, in order."""
    return tuple(_walk(owner, ()))


def _walk(owner: type[Struct], above: Place) -> Iterable[Setting]:
    hints = typing.get_type_hints(owner, include_extras=True)
    group = (owner.__doc__ or "").strip().splitlines()[0].rstrip(".")
    for field in msgspec.structs.fields(owner):
        kind = hints[field.name]
        place = (*above, field.name)
        if isinstance(kind, type) and issubclass(kind, Struct):
            yield from _walk(kind, place)
            continue
        bare, meta = _stripped(kind)
        extra = meta.extra or {} if meta else {}
        own = "--" + field.name.replace("_", "-")
        switch = bare is bool
        yield Setting(
            place=place,
            kind=kind,
            arity=_arity(bare),
            group=group,
            help=(meta.description if meta else None) or "",
            default=field.default,
            choices=_choices(bare),
            names=(own, *extra.get("flags", ())),
            off=("--no-" + own[2:], *extra.get("off", ())) if switch else (),
        )


def _stripped(kind: Any) -> tuple[Any, Meta | None]:
    """Take `Annotated` and `| None` off a field's type; return it and what describes it."""
    meta = None
    while True:
        origin = typing.get_origin(kind)
        if origin is typing.Annotated:
            # A limit of a shared type comes first, the field's own description last.
            metas = [found for found in kind.__metadata__ if isinstance(found, Meta)]
            meta = meta or next((found for found in metas if found.description), None)
            kind = kind.__origin__
        elif origin in (typing.Union, types.UnionType):
            rest = [arm for arm in typing.get_args(kind) if arm is not type(None)]
            if len(rest) != 1:
                return kind, meta
            kind = rest[0]
        else:
            return kind, meta


def _arity(bare: Any) -> Arity:
    if bare is bool:
        return Arity.SWITCH
    return Arity.MANY if typing.get_origin(bare) is tuple else Arity.ONE


def _choices(bare: Any) -> tuple[str, ...]:
    if isinstance(bare, type) and issubclass(bare, StrEnum):
        return tuple(bare)
    return ()


def converted(label: str, known: Setting, said: Any) -> Any:
    """Return `said`, of whatever origin, as the field's type.

    Raises ConfigError naming `label` when the field cannot take it.
    """
    try:
        return msgspec.convert(said, known.kind, strict=False)
    except msgspec.ValidationError as error:
        if known.choices:
            reason = f"{said!r} is none of {', '.join(known.choices)}"
        elif (kind := _stripped(known.kind)[0]) in _NO and "got `str`" in str(error):
            reason = f"{said!r} {_NO[kind]}"
        else:
            wrong = str(error).split(" - at ")[0].replace(" | null", "")
            reason = f"{said!r} will not do: {wrong[0].lower()}{wrong[1:]}"
        raise ConfigError(label, reason) from None


def built(owner: type[T], values: Mapping[Place, Any], above: Place = ()) -> T:
    """Build a struct and those within it from converted values; the rest keeps its default."""
    hints = typing.get_type_hints(owner)
    fields: dict[str, Any] = {}
    for name in owner.__struct_fields__:
        place = (*above, name)
        kind = hints[name]
        if isinstance(kind, type) and issubclass(kind, Struct):
            fields[name] = built(kind, values, place)
        elif place in values:
            fields[name] = values[place]
    return owner(**fields)
