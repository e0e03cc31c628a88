"""How a verb's flags read on a terminal."""

import shutil
import textwrap
from collections.abc import Sequence
from enum import Enum

from drumline.cli.flags import CONFIG_FLAG
from drumline.core.settings import Arity, Setting

_INDENT = " " * 6


def usage(verb: str, about: str, positional: str, flags: Sequence[Setting]) -> str:
    """Return the help of one verb, its flags grouped by the structs that hold them."""
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [" ".join(filter(None, ("usage: drumline", verb, positional, "[flags]"))), "", about]
    group = ""
    for flag in flags:
        if flag.group != group:
            group = flag.group
            lines += ["", f"{group}:"]
        lines += _entry(flag, width)
    lines += [
        "",
        f"  {CONFIG_FLAG} FILE",
        f"{_INDENT}read flags from a TOML file, as `max-model-len = 4096`",
        "",
        *textwrap.wrap(
            "Every flag can be set by a variable, --max-model-len by DRUMLINE_MAX_MODEL_LEN. "
            "A flag wins over its variable, a variable over the file.",
            width,
        ),
    ]
    return "\n".join(lines)


def _entry(flag: Setting, width: int) -> list[str]:
    own = flag.name
    match flag.arity:
        case Arity.SWITCH:
            spelled = f"{own}, {flag.off[0]}"
        case Arity.ONE:
            spelled = f"{own} {' | '.join(flag.choices) or 'VALUE'}"
        case Arity.MANY:
            spelled = f"{own} NAME [NAME …]"
    text = flag.help
    default = shown(flag.default)
    if default:
        text += f" (default: {default})"
    others = aliases(flag)
    if others:
        text += f"; also {', '.join(others)}"
    return [
        *textwrap.wrap(
            spelled,
            width,
            initial_indent="  ",
            subsequent_indent=f"{_INDENT}  ",
            break_on_hyphens=False,
        ),
        *textwrap.wrap(
            text,
            width,
            initial_indent=_INDENT,
            subsequent_indent=_INDENT,
            break_on_hyphens=False,
        ),
    ]


def aliases(flag: Setting) -> list[str]:
    """Return a flag's other spellings, those that switch it off included."""
    return [*flag.names[1:], *flag.off[1:]]


def shown(default: object) -> str:
    """Return a default as an operator would write it; nothing where there is none."""
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default.value if isinstance(default, Enum) else default)
