"""Structural tags said the older way: structures, and the triggers that begin them.

It knows no library; what it returns is a format as either of them is asked for.
"""

from typing import Any

from drumline.grammar.bounds import RefusedGrammarError


def of_structures(tag: dict[str, Any]) -> dict[str, Any]:
    """Return the format that `tag` stands for, the newer way. Raises RefusedGrammarError."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise RefusedGrammarError(
            "a structural tag has either a format, or structures with triggers"
        )
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": [
            {
                "type": "tag",
                "begin": each.get("begin"),
                "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
                "end": each.get("end"),
            }
            for each in structures
            if isinstance(each, dict)
        ],
    }
