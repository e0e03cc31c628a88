"""An answer that is held to a form behind its reasoning, where its prompt opened that.

JSON and calls of tools can be held so; what is held to another form has it from its first token.
"""

from typing import Any

import msgspec
from msgspec.structs import replace

from drumline.frontend.parts.reasoning import END
from drumline.wire.sampling import SamplingParams

_BEHIND = f"{END}\n\n"


def behind_reasoning(sampling: SamplingParams) -> SamplingParams | None:
    """Return `sampling` with its form behind free text that ends reasoning; None where it cannot.

    Schemas and tags that are no JSON are left for the engine to refuse.
    """
    form = _form(sampling)
    if form is None:
        return None
    free = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": _BEHIND}
    tag = {"format": {"type": "sequence", "elements": [free, form]}}
    return replace(sampling, json_schema=None, structural_tag=msgspec.json.encode(tag).decode())


def _form(sampling: SamplingParams) -> dict[str, Any] | None:
    """Return what an answer is held to, as a structural tag has it."""
    try:
        if sampling.json_schema is not None:
            schema = msgspec.json.decode(sampling.json_schema)
            return {"type": "json_schema", "json_schema": schema}
        if sampling.structural_tag is not None:
            tag = msgspec.json.decode(sampling.structural_tag, type=dict[str, Any])
            form = tag.get("format")
            return form if isinstance(form, dict) else None
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        pass
    return None
