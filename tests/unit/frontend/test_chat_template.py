"""Chat templates render as their publishers expect, and cannot reach out of their sandbox."""

import datetime

import pytest

from drumline.core.errors import ConfigError, RequestError
from drumline.frontend.text.chat_template import ChatTemplate, given_template

HELLO = [{"role": "user", "content": "Hi <b>&ü"}]


def template(source, **options):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", **options)


def test_the_embedded_template_renders_a_conversation(embedded):
    prompt = ChatTemplate(
        embedded.facts.chat_template, bos_token="<|im_start|>", eos_token="<|im_end|>"
    ).render([{"role": "system", "content": "Be brief."}, *HELLO])
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>&ü<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_templates_get_what_they_are_written_for():
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m.content | tojson }}{% endfor %}{% if add_generation_prompt %}"
        "{% generation %}go{% endgeneration %}{% endif %}{{ eos_token }}{{ tools is none }}"
    )
    assert template(source).render([*HELLO, *HELLO]) == '<s>"Hi <b>&ü"go</s>True'
    assert template(source).render(HELLO, add_generation_prompt=False) == '<s>"Hi <b>&ü"</s>True'


def test_blocks_leave_no_white_space_behind():
    assert template("{% if true %}\n  x\n  {% endif %}\ny").render(HELLO) == "  x\ny"


def test_the_date_is_the_clocks():
    class Clock:
        def now_us(self):
            return 0

        def wall_s(self):
            return datetime.datetime(2024, 2, 29, 12).timestamp()

    assert template("{{ strftime_now('%d %b %Y') }}", clock=Clock()).render([]) == "29 Feb 2024"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].missing.deeper }}", "no attribute"),
        ("{{ messages + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({'a': 1}) }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ range(10 ** 9) }}", "too big"),
    ],
)
def test_what_a_template_refuses_is_the_clients_error(source, reason):
    with pytest.raises(RequestError, match=reason) as refused:
        template(source).render(HELLO)
    assert (refused.value.status, refused.value.param) == (400, "messages")


class Hurrying:
    """A clock on which a second goes by with each look."""

    def __init__(self):
        self._now_us = 0

    def now_us(self):
        self._now_us += 1_000_000
        return self._now_us

    def wall_s(self):
        return 0.0


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(9) }}",
        "{% for a in [1] recursive %}{% if loop.depth < 9 %}{{ loop(range(999)) }}{% endif %}"
        "{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_ended(source):
    with pytest.raises(RequestError, match="does not end within 5 s"):
        template(source, clock=Hurrying()).render(HELLO)


@pytest.mark.parametrize("source", ["{{ 9**(9**9) }}", "{{ 'x' * 10**9 }}", "{{ [0] * 10**9 }}"])
def test_a_template_makes_no_values_without_bounds(source):
    with pytest.raises(RequestError, match="too large a value"):
        template(source).render(HELLO)


def test_loops_know_where_they_are():
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% else %}none"
        "{% endfor %}{{ '-' * 3 }}{{ 2**8 }}{{ 1.5 * 2 }}"
    )
    assert template(source).render([*HELLO, *HELLO]) == "1/2False 2/2True ---2563.0"
    assert template(source).render([]) == "none---2563.0"


@pytest.mark.parametrize(
    "source",
    ["{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% for a in [1] %}" * 30 + "{% endfor %}" * 30],
    ids=["brackets", "blocks"],
)
def test_a_template_that_is_nested_too_deeply_is_refused_at_once(source):
    with pytest.raises(ConfigError, match="nested too deeply"):
        template(source)


def test_a_clients_variables_reach_the_template_but_take_no_name_of_its_own():
    source = "{{ self_ }}{{ tone }}{{ bos_token }}{{ messages[0].content }}{{ tools }}"
    variables = {"self": 1, "self_": 2, "tone": "dry", "bos_token": "x", "tools": 3, "messages": []}
    assert template(source).render(HELLO, variables=variables) == "2dry<s>Hi <b>&üNone"


def test_what_is_no_template_is_refused_at_once():
    with pytest.raises(ConfigError, match="line 2"):
        template("\n{% if %}")


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("said", ["So", "end", " a|", "<|end|>", "ü "])
def test_a_final_message_that_is_continued_is_not_ended(said):
    prompt = template(CHATML).render_open([*HELLO, {"role": "assistant", "content": said}])
    assert prompt == f"<|user|>Hi <b>&ü<|end|><|assistant|>{said.lstrip()}"


def test_a_final_message_that_the_template_drops_cannot_be_continued():
    with pytest.raises(RequestError, match="does not show the final message"):
        template("{{ messages[0].content }}").render_open([*HELLO, *HELLO])


def test_tools_reach_the_template():
    source = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    assert template(source).render(HELLO, tools=[{"name": "clock"}]) == '{"name": "clock"}'


def test_an_operator_names_a_file_or_writes_the_template_itself(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}ü")
    assert given_template(str(file)) == "{{ messages[0].content }}ü"
    assert given_template("{% if x %}{% endif %}") == "{% if x %}{% endif %}"
    with pytest.raises(ConfigError, match=r"^--chat-template: .*no-such"):
        given_template(str(tmp_path / "no-such"))
    with pytest.raises(ConfigError, match="--chat-template"):
        given_template("\0")
