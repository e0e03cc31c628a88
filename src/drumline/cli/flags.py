"""A command's settings as flags, environment variables and lines of a file.

What wins: a flag, then the environment (`DRUMLINE_<FIELD>`), then the file of
`--config`, then the default. It knows no flag by name (`core.settings`).
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from drumline.cli.headless import check_headless
from drumline.cli.peers import EQUIVALENTS, IGNORED
from drumline.core.errors import ConfigError
from drumline.core.settings import Arity, Place, Setting, built, converted

T = TypeVar("T", bound=Struct)

PREFIX = "DRUMLINE_"
CONFIG_FLAG = "--config"
CONFIG_VARIABLE = PREFIX + "CONFIG"
_NEAR = 0.8
"""How like a known flag a word must be to be taken for a slip; less would mislead."""


def variable_of(setting: Setting) -> str:
    """Return the environment variable that sets a setting."""
    return PREFIX + setting.field.upper()


class Arguments(Struct):
    """What the command line said, unconverted."""

    said: dict[Place, Any] = {}
    """By field; a switch is a bool, a list a list, all else a string."""
    positionals: list[str] = []
    config: str | None = None
    notes: list[str] = []
    """What the operator should hear about flags that have no effect here."""


def read_arguments(flags: Sequence[Setting], argv: Sequence[str]) -> Arguments:
    """Sort a command line's words into fields and positionals, converting nothing.

    Raises ConfigError for a flag that is not among `flags` and for a missing value.
    """
    on = {name: flag for flag in flags for name in flag.names}
    off = {name: flag for flag in flags for name in flag.off}
    found = Arguments()
    words = list(argv)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--":
            found.positionals += words[at:]
            break
        if not _is_flag(word):
            found.positionals.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        inline = value if equals else None
        if name == CONFIG_FLAG:
            found.config = inline
            if inline is None:
                found.config, at = _value(name, words, at), at + 1
        elif name in off:
            if inline is not None:
                raise ConfigError(name, "it takes no value")
            found.said[off[name].place] = False
        elif name in on:
            at = _take(found, on[name], name, inline, words, at)
        elif name in IGNORED:
            found.notes.append(f"{name}: {IGNORED[name]}")
        else:
            raise ConfigError(name, _unknown(name, [CONFIG_FLAG, *on, *off]))
    return found


def _take(
    found: Arguments, flag: Setting, name: str, inline: str | None, words: list[str], at: int
) -> int:
    """Note the value of a flag; return where the next word is."""
    match flag.arity:
        case Arity.SWITCH:
            found.said[flag.place] = True if inline is None else inline
        case Arity.ONE:
            if inline is None:
                inline, at = _value(name, words, at), at + 1
            found.said[flag.place] = inline
        case Arity.MANY:
            several = found.said.setdefault(flag.place, [])
            if inline is None:
                several.append(_value(name, words, at))
                at += 1
                while at < len(words) and not _is_flag(words[at]):
                    several.append(words[at])
                    at += 1
            else:
                several.append(inline)
    return at


def _is_flag(word: str) -> bool:
    """Whether a word is a flag: `-` alone and negative numbers are values."""
    return word.startswith("-") and len(word) > 1 and not word[1].isdigit() and word[1] != "."


def _value(name: str, words: list[str], at: int) -> str:
    if at == len(words) or words[at].startswith("--"):
        raise ConfigError(name, "it needs a value")
    return words[at]


def _unknown(name: str, known: Sequence[str]) -> str:
    if name in EQUIVALENTS:
        return f"unknown flag; {EQUIVALENTS[name]}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
    return f"unknown flag; did you mean {near[0]}?" if near else "unknown flag; see --help"


def assemble(
    command: type[T],
    flags: Sequence[Setting],
    arguments: Arguments,
    environment: Mapping[str, str],
    known_variables: Iterable[str] = (),
) -> T:
    """Build a command's struct from all that was said.

    `known_variables` are variables of other commands, which this one passes over;
    any other `DRUMLINE_*` name is refused. Raises ConfigError naming the flag,
    variable or file entry that is wrong.
    """
    by_variable = {variable_of(flag): flag for flag in flags}
    known = {CONFIG_VARIABLE, *by_variable, *known_variables}
    for variable in environment:
        if variable.startswith(PREFIX) and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help for the flags"
            raise ConfigError(variable, f"unknown environment variable; {hint}")
    values: dict[Place, Any] = {}
    path = arguments.config or environment.get(CONFIG_VARIABLE)
    if path:
        values |= _from_file(flags, path)
    for variable, flag in by_variable.items():
        if variable in environment:
            text = environment[variable]
            several = [part for part in text.split(",") if part]
            said: Any = several if flag.arity is Arity.MANY else text
            values[flag.place] = converted(variable, flag, said)
    by_place = {flag.place: flag for flag in flags}
    for place, said in arguments.said.items():
        values[place] = converted(by_place[place].name, by_place[place], said)
    check_headless(flags, values)
    return built(command, values)


def _from_file(flags: Sequence[Setting], path: str) -> dict[Place, Any]:
    try:
        with Path(path).open("rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        raise ConfigError(CONFIG_FLAG, f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(CONFIG_FLAG, f"{path} is not TOML: {error}") from None
    spelled = {name.lstrip("-"): flag for flag in flags for name in flag.names}
    sections = {flag.place[-2] for flag in flags if len(flag.place) > 1}
    values: dict[Place, Any] = {}
    for key, entry in tree.items():
        inside = entry if isinstance(entry, dict) else {key: entry}
        if isinstance(entry, dict) and key not in sections:
            raise ConfigError(f"{path}: [{key}]", f"unknown section; known: {sorted(sections)}")
        for name, said in inside.items():
            flag = spelled.get(name.replace("_", "-"))
            if flag is None:
                near = difflib.get_close_matches(name.replace("_", "-"), spelled, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"{path}: {name}", f"unknown setting{hint}")
            values[flag.place] = converted(f"{path}: {name}", flag, said)
    return values
