"""An answer that is held to a form behind its reasoning, where its prompt opened that."""

from typing import Any

import msgspec
from msgspec.structs import replace

from drumline.frontend.parts.reasoning import END
from drumline.wire.own_params import NAME
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
    return replace(
        sampling,
        json_schema=None,
        regex=None,
        ebnf=None,
        custom_params=_without_choice(sampling.custom_params),
        structural_tag=msgspec.json.encode(tag).decode(),
    )


def _without_choice(params: dict[str, Any] | None) -> dict[str, Any] | None:
    if params is None or "choice" not in params.get(NAME, {}):
        return params
    own = {name: value for name, value in params[NAME].items() if name != "choice"}
    return {**params, NAME: own}


def _form(sampling: SamplingParams) -> dict[str, Any] | None:
    """Return what an answer is held to, as a structural tag has it."""
    if sampling.regex is not None:
        return {"type": "regex", "pattern": sampling.regex}
    if sampling.ebnf is not None:
        return {"type": "grammar", "grammar": sampling.ebnf}
    choice = (sampling.custom_params or {}).get(NAME, {}).get("choice")
    if choice is not None:
        each = [{"type": "const_string", "value": value} for value in choice]
        return {"type": "or", "elements": each}
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
