"""What a request holds its answer to, brought into the wire's form.

OpenAI's `response_format`, and the names other engines' users know: `structured_outputs`,
`guided_…`, and `json_schema`, `regex` and `ebnf` by themselves. Whether a grammar compiles is
the engine's to say.
"""

from typing import Any

import msgspec

from drumline.core.errors import RequestError, quoted
from drumline.frontend.openai.schema import SamplingFields
from drumline.wire.own_params import NAME

_ANY_OBJECT = '{"type":"object"}'
_FORMATS = "'text', 'json_object', 'json_schema' and 'structural_tag'"
_MISSING = "missing_required_parameter"
_STRUCTURED = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")

Found = list[tuple[str, str, Any]]
"""Who asks (a parameter), for which kind, with what."""


def grammar_params(fields: SamplingFields) -> dict[str, Any]:
    """Return the sampling parameters that hold an answer to a grammar; none if it is free.

    Raises RequestError 400 naming the parameter that is malformed, or that asks for a second one.
    """
    found = [] if fields.response_format is None else _response_format(fields.response_format)
    found += _structured(fields.structured_outputs or {})
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(fields, f"guided_{kind}")
        if value is not None:
            found.append((f"guided_{kind}", kind, value))
    for name, kind in (("json_schema", "json"), ("regex", "regex"), ("ebnf", "grammar")):
        value = getattr(fields, name)
        if value is not None:
            found.append((name, kind, value))
    if len(found) > 1:
        names = " and ".join(param for param, _, _ in found)
        raise _refused(found[1][0], f"{names} are set together; an answer is held to one of them")
    for param, kind, value in found:
        return _wire_params(param, kind, value)
    return {}


def _response_format(format_: dict[str, Any]) -> Found:
    param = "response_format"
    kind = format_.get("type")
    if kind is None:
        raise _refused(f"{param}.type", f"is missing; {_FORMATS} are supported", _MISSING)
    match kind:
        case "text":
            return []
        case "json_object":
            return [(param, "json_object", True)]
        case "json_schema":
            inner = format_.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if schema is None:
                raise _refused(f"{param}.json_schema.schema", "is missing", _MISSING)
            return [(param, "json", schema)]
        case "structural_tag":
            return [(param, "structural_tag", format_)]
    raise _refused(
        f"{param}.type", f"{quoted(kind)} is not supported; {_FORMATS} are", "unsupported_parameter"
    )


def _structured(asked: dict[str, Any]) -> Found:
    param = "structured_outputs"
    unknown = [name for name in asked if name not in _STRUCTURED]
    if unknown:
        raise _refused(param, f"{quoted(unknown[0])} is not known; {', '.join(_STRUCTURED)} are")
    return [(param, kind, value) for kind, value in asked.items() if value not in (None, False)]


def _wire_params(param: str, kind: str, value: Any) -> dict[str, Any]:
    match kind:
        case "json_object":
            return {"json_schema": _ANY_OBJECT}
        case "json":
            return {"json_schema": _text(value)}
        case "structural_tag":
            return {"structural_tag": _text(value)}
        case "choice":
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise _refused(param, "choices are a list of strings")
            return {"custom_params": {NAME: {"choice": value}}}
    if not isinstance(value, str):
        raise _refused(param, f"a {kind} is a string")
    return {"regex" if kind == "regex" else "ebnf": value}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _refused(param: str, why: str, code: str = "invalid_value") -> RequestError:
    return RequestError(400, f"{param}: {why}", param=param, code=code)
