# ruff: noqa: E501  a row of a table is a line
"""No parameter is dropped without a rule: honoured, refused by name, or known to change nothing.

Run this file to write the page of them anew.
"""

import json
import logging
from pathlib import Path

import pytest
from msgspec import Struct
from tests.fakes.http import routes_of

from drumline.core.errors import RequestError
from drumline.core.model_files import find_model
from drumline.frontend.anthropic.request import REST as MESSAGES_REST
from drumline.frontend.anthropic.schema import MessagesRequest
from drumline.frontend.native.aborts import AbortRequest
from drumline.frontend.native.generate import GenerateRequest, GenerateSampling
from drumline.frontend.native.tokens import DetokenizeRequest, TokenizeRequest
from drumline.frontend.openai.embeddings import REST as EMBEDDINGS_REST
from drumline.frontend.openai.embeddings import EmbeddingRequest
from drumline.frontend.openai.parameters import IGNORED, REFUSED, REST, ParameterCheck
from drumline.frontend.openai.schema import ChatRequest, CompletionRequest
from drumline.frontend.responses.request import REST as RESPONSES_REST
from drumline.frontend.responses.schema import ResponsesRequest
from drumline.frontend.text.load import load_tokenizer

CONTROL = """### Control routes

Their fields stand in the body or in the query, and one that there is not is refused with 400, which
names those there are; `docs/control.md` says what they do.
"""
PAGE = Path(__file__).parents[3] / "docs" / "guide" / "compatibility.md"
INTRODUCTION = """# Compatibility

Whoever comes from OpenAI, vLLM, SGLang or TokenSpeed changes the base URL. This page says what each
route is, what becomes of each parameter, and how a refusal looks. It is written from the code, by
`python tests/unit/frontend/test_parameters.py`.

## Routes

Who may call: *open* needs no key; *client* one of `--api-key` or `--api-key-file`, where there are any;
*control* that of `--admin-api-key`, or a client's where there is none. A key is sent as `Authorization:
Bearer KEY` or as `X-Api-Key`.
"""
ERRORS = """## Errors

`{"error": {"message", "type", "param", "code"}}`; Anthropic's routes have theirs. In a stream an error
is the last event, followed by `[DONE]`. `X-Request-Id` is taken, and is in every reply. Of a
long value a message quotes the ends.

| status | code | when |
|---|---|---|
| 400 | `invalid_json`, `invalid_type`, `missing_required_parameter` | the body cannot be read; `param` is the field |
| 400 | `…_below_min_value`, `…_above_max_value`, `invalid_value`, … | a value is out of its range |
| 400 | `array_above_max_length` | too many entries: 4,096 messages are taken, 128 tools |
| 400 | `unsupported_parameter` | see below |
| 400 | `context_length_exceeded`, `kv_pool_exceeded` | prompt and answer do not fit, with the numbers |
| 401, 403 | `missing_api_key`, `invalid_api_key`; `insufficient_permissions` | a key is needed; another one is |
| 404, 405 | `model_not_found`, `unknown_url`; `method_not_allowed` | |
| 408 | `request_timeout` | it took longer than `--request-timeout` |
| 409 | `request_id_in_use` | the id is in flight |
| 413 | `body_too_large` | over `--max-body-bytes` |
| 429 | `too_many_requests`, `engine_refused` | over `--max-concurrent-streams`, or queues are full; `Retry-After` |
| 500 | `internal`, `engine_failed` | a fault of ours; the log says more |
| 503 | `draining`, `engine_dead`, … | `Retry-After`, except where the engine is gone for good |
"""
PARAMETERS = """## Parameters

What becomes of each parameter of `/v1/chat/completions` and `/v1/completions`. What could change
the answer and is not to be had is refused with 400, `unsupported_parameter`, unless its value asks
for nothing (null, false, or empty). A name that stands in none of these lists is ignored, and
logged once. The lists are `frontend/openai/schema.py` and `frontend/openai/parameters.py`, those of
the other APIs, at the end, `schema.py` and `request.py` of their rooms. In `/generate` what is
refused and ignored is the same.
"""


PLAIN = {
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/abort_request": AbortRequest,
}
"""Routes whose other names are ignored without a rule."""
OTHERS = {
    "/v1/embeddings": (EmbeddingRequest, EMBEDDINGS_REST),
    "/v1/messages": (MessagesRequest, MESSAGES_REST),
    "/v1/responses": (ResponsesRequest, RESPONSES_REST),
}


def routes() -> list[str]:
    """Return the table of routes, those of one meaning in a line."""
    paths: dict[tuple[str, str, str], list[str]] = {}
    for entry in routes_of(load_tokenizer(find_model(None))):
        key = (entry.methods, entry.about, entry.access.value)
        paths.setdefault(key, []).append(f"`{entry.path.replace(':path', '')}`")
    lines = ["| method | path | what | who |", "|---|---|---|---|"]
    for (methods, about, access), same in paths.items():
        lines.append(f"| {methods.replace(' ', ', ')} | {' '.join(same)} | {about} | {access} |")
    return lines


def page() -> str:
    both: dict[str, type[Struct]] = {"chat": ChatRequest, "completions": CompletionRequest}
    names = dict.fromkeys(name for kind in both.values() for name in kind.__struct_fields__)
    lines = [*routes(), "", ERRORS, PARAMETERS]
    lines += ["### Honoured", "", "| parameter | of |", "|---|---|"]
    for name in names:
        of = [route for route, kind in both.items() if name in kind.__struct_fields__]
        lines.append(f"| `{name}` | {' and '.join(of)} |")
    lines += ["", "### Refused", "", "| parameter | why |", "|---|---|"]
    lines += [f"| `{name}` | {refused.why} |" for name, refused in REFUSED.items()]
    lines += ["", "### Ignored", "", "| parameter | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in IGNORED.items()]
    own = dict.fromkeys(GenerateRequest.__struct_fields__, "body")
    own |= dict.fromkeys(GenerateSampling.__struct_fields__, "`sampling_params`")
    lines += ["", "### /generate", "", "| honoured | in |", "|---|---|"]
    lines += [f"| `{name}` | {where} |" for name, where in own.items()]
    for path, (kind, rest) in OTHERS.items():
        lines += ["", f"### {path}", "", "| parameter | |", "|---|---|"]
        lines += [f"| `{name}` | honoured |" for name in kind.__struct_fields__]
        lines += [f"| `{name}` | refused: {one.why} |" for name, one in rest.refused.items()]
        lines += [f"| `{name}` | ignored: {why} |" for name, why in rest.ignored.items()]
    for path, kind in PLAIN.items():
        lines += ["", f"### {path}", "", "| parameter | |", "|---|---|"]
        lines += [f"| `{name}` | honoured |" for name in kind.__struct_fields__]
    lines += ["", CONTROL]
    return "\n".join([INTRODUCTION, *lines])


def judged(kind=ChatRequest, check: ParameterCheck | None = None, **body) -> None:
    (check or ParameterCheck(kind)).check(json.dumps(body).encode())


def test_the_page_lists_every_parameter():
    assert PAGE.read_text() == page(), f"run python {Path(__file__).name}"


@pytest.mark.parametrize(
    ("kind", "rest"), [(ChatRequest, REST), (CompletionRequest, REST), *OTHERS.values()]
)
def test_the_lists_do_not_contradict_each_other(kind, rest):
    fields = set(kind.__struct_fields__)
    assert not rest.refused.keys() & rest.ignored.keys()
    assert not fields & (rest.refused.keys() | rest.ignored.keys())


def test_a_refused_parameter_is_named_with_the_reason():
    for name, refused in REFUSED.items():
        with pytest.raises(RequestError) as caught:
            judged(**{name: "something"})
        error = caught.value
        assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
        assert str(error) == f"{name}: {refused.why}"


@pytest.mark.parametrize("nothing", [None, False, [], {}, ""])
def test_a_value_that_asks_for_nothing_is_no_reason_to_refuse(nothing):
    judged(**dict.fromkeys(REFUSED, nothing))


@pytest.mark.parametrize(
    ("name", "value"),
    [("tool_choice", "none"), ("length_penalty", 1.0), ("modalities", ["text"]), ("mirostat", 0)],
)
def test_a_neutral_value_is_no_reason_to_refuse(name, value):
    judged(**{name: value})


@pytest.mark.parametrize("value", [0, True, [0], {"a": None}, 1])
def test_zero_and_true_ask_for_something(value):
    with pytest.raises(RequestError, match="return_hidden_states"):
        judged(return_hidden_states=value)


def test_what_changes_nothing_is_ignored_without_a_word(caplog):
    judged(**dict.fromkeys(IGNORED, "x"), messages=[])
    assert not caplog.records


def test_an_unknown_name_is_logged_once_with_what_was_meant(caplog):
    check = ParameterCheck(ChatRequest)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            judged(check=check, temprature=0.1, colour="red")
    assert [record.getMessage() for record in caplog.records] == [
        "requests have an unknown field 'temprature', which is ignored; "
        "did its sender mean temperature?",
        "requests have an unknown field 'colour', which is ignored",
    ]


def test_a_client_cannot_fill_the_log_with_names(caplog):
    check = ParameterCheck(ChatRequest)
    with caplog.at_level(logging.WARNING):
        judged(check=check, **{f"{'x' * 1000}{n}": n for n in range(3)})
        judged(check=check, **{f"field{n}": n for n in range(1000)})
    assert len(caplog.records) == 65
    assert max(len(record.getMessage()) for record in caplog.records) < 150


if __name__ == "__main__":
    PAGE.write_text(page())
