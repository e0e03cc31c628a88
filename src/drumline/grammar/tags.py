"""Structural tags in Lark's language, for a library that has no such thing.

It writes the formats that texts around JSON are made of; each other one is refused by its name.
"""

import json
import re
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from drumline.core.errors import quoted
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.structures import of_structures
from drumline.grammar.white_space import check_white_space

_ANY_TEXT = r"/(.|\n)*/"
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def lark_of(tag: Any) -> str:
    """Return the grammar of a decoded structural tag. Raises RefusedGrammarError."""
    if not isinstance(tag, dict):
        raise RefusedGrammarError("a structural tag is a JSON object")
    writer = _Lark()
    root = writer.write(tag["format"] if "format" in tag else of_structures(tag))
    return "\n".join(["%llguidance {}", f"start: {root}", *writer.rules])


class _Lark:
    """One grammar's rules."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def write(self, format_: Any) -> str:
        """Return the name of a rule that matches a format."""
        if not isinstance(format_, dict):
            raise RefusedGrammarError("a format is a JSON object")
        kind = format_.get("type")
        match kind:
            case "const_string":
                return self._rule(_quoted(format_.get("value"), "value"))
            case "json_schema" if format_.get("style", "json") == "json":
                schema = format_.get("json_schema")
                check_white_space(schema)
                return self._rule(f"%json {json.dumps(schema)}")
            case "regex":
                return self._terminal(_slashed(format_.get("pattern")))
            case "grammar":
                inner = gbnf_to_lark(_string(format_.get("grammar"), "grammar"))
                return self._rule(f"%lark {{\n{inner}\n}}")
            case "any_text" if not format_.get("excludes"):
                return self._terminal(_ANY_TEXT)
            case "sequence" | "or":
                parts = [self.write(part) for part in _parts(format_, "elements")]
                return self._rule((" " if kind == "sequence" else " | ").join(parts))
            case "optional" | "plus" | "star":
                mark = {"optional": "?", "plus": "+", "star": "*"}[kind]
                return self._rule(f"({self.write(format_.get('content'))}){mark}")
            case "tag":
                return self._tag(format_, "")
            case "tags_with_separator":
                return self._separated(format_)
            case "triggered_tags" if not format_.get("excludes"):
                return self._triggered(format_)
        raise RefusedGrammarError(
            f"the format {quoted(kind)} of a structural tag is not supported with llguidance; "
            "it may be with --grammar-backend xgrammar"
        )

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"TEXT_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _tag(self, tag: Any, begun: str) -> str:
        """Return a rule for a tag, of which `begun` was matched already."""
        if not isinstance(tag, dict):
            raise RefusedGrammarError("a tag is a JSON object")
        begin, end = tag.get("begin"), tag.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise RefusedGrammarError("a tag has a begin and an end, which are strings")
        begin_left = _quoted(begin[len(begun) :])
        inner = tag.get("content")
        if isinstance(inner, dict) and inner == {"type": "any_text"} and end:
            # Lazy: free text ends at the first end in it.
            name = f"until_{len(self.rules)}"
            self.rules.append(f"{name}[lazy]: {_ANY_TEXT} {_quoted(end)}")
            return self._rule(f"{begin_left} {name}")
        content = self.write(inner)
        return self._rule(f"{begin_left} {content} {_quoted(end)}")

    def _separated(self, format_: dict[str, Any]) -> str:
        one = self._rule(" | ".join(self._tag(tag, "") for tag in _parts(format_, "tags")))
        several = one
        if not format_.get("stop_after_first"):
            between = _quoted(format_.get("separator", ""), "separator")
            several = self._rule(f"{one} ({between} {one})*")
        return several if format_.get("at_least_one") else self._rule(f"({several})?")

    def _triggered(self, format_: dict[str, Any]) -> str:
        """Return a rule for text that is free until a trigger, from which on a tag follows."""
        tags = _parts(format_, "tags")
        choices = []
        for trigger in _parts(format_, "triggers"):
            begun = [
                self._tag(tag, trigger)
                for tag in tags
                if isinstance(tag, dict) and str(tag.get("begin", "")).startswith(str(trigger))
            ]
            if not begun:
                raise RefusedGrammarError(f"no tag begins with the trigger {quoted(trigger)}")
            # Lazy: text ends at the first trigger in it.
            name = f"free_{len(self.rules)}"
            self.rules.append(f"{name}[lazy]: {_ANY_TEXT} {_quoted(trigger, 'trigger')}")
            choices.append(self._rule(f"{name} ({' | '.join(begun)})"))
        each = f"({' | '.join(choices)})"
        rest = self._terminal(_ANY_TEXT)
        many = "+" if format_.get("at_least_one") else "*"
        if format_.get("stop_after_first"):
            # Behind the one tag nothing comes; without any, text that holds no trigger.
            return self._rule(each if many == "+" else f"{each} | {rest}")
        return self._rule(f"{each}{many} {rest}")


def _parts(format_: dict[str, Any], word: str) -> list[Any]:
    parts = format_.get(word)
    if not isinstance(parts, list) or not parts:
        raise RefusedGrammarError(f"{format_.get('type')}: {word} is a list of at least one entry")
    return parts


def _quoted(value: Any, word: str = "value") -> str:
    return json.dumps(value) if _string(value, word) else ""


def _slashed(pattern: Any) -> str:
    """Return a regex between slashes, of which none that is in it ends it."""
    escaped = _SLASH.sub(lambda found: found[1] or r"\/", _string(pattern, "pattern"))
    return "/{}/".format(escaped.replace("\n", r"\n"))


def _string(value: Any, word: str) -> str:
    if not isinstance(value, str):
        raise RefusedGrammarError(f"{word} is a string")
    return value
