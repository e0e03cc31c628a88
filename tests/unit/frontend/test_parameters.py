"""No parameter is dropped without a rule: honoured, refused by name, or known to change nothing.

Run this file to write the page of them anew.
"""

import json
import logging
from pathlib import Path

import pytest
from msgspec import Struct

from drumline.core.errors import RequestError
from drumline.frontend.anthropic.request import REST as MESSAGES_REST
from drumline.frontend.anthropic.schema import MessagesRequest
from drumline.frontend.openai.parameters import IGNORED, REFUSED, REST, ParameterCheck
from drumline.frontend.openai.schema import ChatRequest, CompletionRequest
from drumline.frontend.responses.request import REST as RESPONSES_REST
from drumline.frontend.responses.schema import ResponsesRequest

PAGE = Path(__file__).parents[3] / "docs" / "parameters.md"
INTRODUCTION = """# Parameters of a request

What becomes of each parameter of `/v1/chat/completions` and `/v1/completions`. What could change
the answer and is not to be had is refused with 400, `unsupported_parameter`, unless its value asks
for nothing (null, false, or empty). A name that stands in none of these lists is ignored, and
logged once. The lists are `frontend/openai/schema.py` and `frontend/openai/parameters.py`, those of
the other two APIs, at the end, `schema.py` and `request.py` of their rooms;
`python tests/unit/frontend/test_parameters.py` writes this page.
"""


OTHERS = {
    "/v1/messages": (MessagesRequest, MESSAGES_REST),
    "/v1/responses": (ResponsesRequest, RESPONSES_REST),
}


def page() -> str:
    both: dict[str, type[Struct]] = {"chat": ChatRequest, "completions": CompletionRequest}
    names = dict.fromkeys(name for kind in both.values() for name in kind.__struct_fields__)
    lines = ["## Honoured", "", "| parameter | of |", "|---|---|"]
    for name in names:
        of = [route for route, kind in both.items() if name in kind.__struct_fields__]
        lines.append(f"| `{name}` | {' and '.join(of)} |")
    lines += ["", "## Refused", "", "| parameter | why |", "|---|---|"]
    lines += [f"| `{name}` | {refused.why} |" for name, refused in REFUSED.items()]
    lines += ["", "## Ignored", "", "| parameter | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in IGNORED.items()]
    for path, (kind, rest) in OTHERS.items():
        lines += ["", f"## {path}", "", "| parameter | |", "|---|---|"]
        lines += [f"| `{name}` | honoured |" for name in kind.__struct_fields__]
        lines += [f"| `{name}` | refused: {one.why} |" for name, one in rest.refused.items()]
        lines += [f"| `{name}` | ignored: {why} |" for name, why in rest.ignored.items()]
    return "\n".join([INTRODUCTION, *lines, ""])


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
    with pytest.raises(RequestError, match="return_token_ids"):
        judged(return_token_ids=value)


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
