"""The table of routes as a document: `/openapi.json`, and a page that needs nothing from the net.

Schemas are those of the structs that bodies are decoded into, so that no document can
promise what no decoder takes.
"""

import html
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from starlette.types import ASGIApp

from drumline.core.version import VERSION
from drumline.frontend.access import Access
from drumline.frontend.web.dialect import OPENAI, Dialect

_REFS = "#/components/schemas/{name}"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code{font:14px ui-monospace,monospace}details{margin:.4em 0}td,th{text-align:left;"
    "padding:.1em 1em .1em 0;vertical-align:top}summary{cursor:pointer}"
)


class Entry(Struct, frozen=True):
    """One route: its methods, its path, who may call it, what answers it, what for, and how."""

    methods: str
    path: str
    access: Access
    app: ASGIApp
    about: str
    body: type[Struct] | None = None
    dialect: Dialect = OPENAI


def document(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the routes as an OpenAPI 3.1 document."""
    bodies = [entry.body for entry in entries if entry.body is not None]
    errors = {entry.dialect.error_body for entry in entries}
    kinds = [*bodies, *sorted(errors, key=lambda kind: kind.__name__)]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REFS)
    paths: dict[str, Any] = {}
    for entry in entries:
        path = entry.path.replace(":path}", "}")
        for method in entry.methods.split():
            paths.setdefault(path, {})[method.lower()] = _operation(entry, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "drumline", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(entry: Entry, path: str) -> dict[str, Any]:
    told = _REFS.format(name=entry.dialect.error_body.__name__)
    error = {"application/json": {"schema": {"$ref": told}}}
    operation: dict[str, Any] = {
        "summary": entry.about,
        "tags": [entry.access.value],
        "responses": {
            "200": {"description": "what was asked for"},
            "default": {"description": "why not", "content": error},
        },
    }
    if entry.access is not Access.OPEN:
        operation["security"] = [{"key": []}, {}]
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if entry.body is not None:
        schema = {"$ref": _REFS.format(name=entry.body.__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def page(entries: Sequence[Entry]) -> str:
    """Return the routes and the fields of their bodies as HTML for a person."""
    found = document(entries)
    schemas = found["components"]["schemas"]
    rows = []
    for entry in entries:
        line = f"<code>{html.escape(entry.methods)} {html.escape(entry.path)}</code> "
        line += f"{html.escape(entry.about)} <small>({entry.access.value})</small>"
        if entry.body is None:
            rows.append(f"<div>{line}</div>")
            continue
        schema = schemas[entry.body.__name__]
        required = set(schema.get("required", ()))
        fields = "".join(
            f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_kind(field))}"
            f"{', required' if name in required else ''}</td></tr>"
            for name, field in schema["properties"].items()
        )
        rows.append(f"<details><summary>{line}</summary><table>{fields}</table></details>")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>drumline {VERSION}</title>"
        f"<style>{_STYLE}</style><h1>drumline {VERSION}</h1>"
        "<p>Bodies are JSON. The same as a document: <a href=openapi.json>openapi.json</a>.</p>"
        + "".join(rows)
    )


def _kind(field: dict[str, Any]) -> str:
    """Return a schema's type as one word, or several."""
    if "anyOf" in field:
        kinds = [_kind(arm) for arm in field["anyOf"]]
        return " or ".join(kind for kind in kinds if kind != "null")
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "anything"))
