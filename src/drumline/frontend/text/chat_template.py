"""A model's chat template: a conversation to the prompt that the model was trained on.

Templates come with checkpoints and are not trusted: they run in Jinja's immutable
sandbox, for some seconds at most. They see what the publishers of models write them
for: `messages`, `tools`, `add_generation_prompt`, `bos_token`, `eos_token`,
`raise_exception`, `strftime_now`, a `tojson` that keeps Unicode, `break` and
`continue`, and the `generation` block, which only marks text.
"""

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from drumline.core.clock import SystemClock
from drumline.core.errors import ConfigError, RequestError, excerpt

_NO_VARIABLES: Mapping[str, Any] = {}
_FLAG = "--chat-template"
_TIMED = "while there is time"
_LONGEST_US = 5_000_000
_MOST_GROWTH = 1 << 16
_END = "\ue000end of what is continued\ue001"
"""Marks where a message ends while a prompt is rendered; of letters that no language has."""


def given_template(setting: str) -> str:
    """Return the template that an operator named: a file's, or `setting` if it is one itself.

    Raises ConfigError for a file that cannot be read.
    """
    if "{{" in setting or "{%" in setting:
        return setting
    try:
        return Path(setting).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            _FLAG, f"{setting!r} is no template, as it has no {{{{ or {{%, and no file: {error}"
        ) from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: the text inside, unchanged."""

    # Jinja knows extensions only as subclasses.
    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, in which a rendering also ends: none takes longer than `_LONGEST_US`.

    Calls look at the clock, and loops, whose iterables go through the filter `_TIMED`.
    """

    # Jinja takes a sandbox's rules from a subclass. What is not computed while a template is
    # compiled is only what stands here.
    intercepted_binops = frozenset({"*", "**"})
    clock: SystemClock

    def begin(self) -> None:
        """Begin a rendering."""
        self._ends_us = self.clock.now_us() + _LONGEST_US

    def timed(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Yield what `iterable` does while there is time."""
        for each in iterable:
            self._check_time()
            yield each

    def call(
        __self,  # noqa: N805 (as in Jinja: what a template calls may have a `self` by name)
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        __self._check_time()
        if isinstance(__obj, jinja2.runtime.LoopContext):  # a loop that recurses into others
            args = (__self.timed(args[0]), *args[1:])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if _growth(operator, left, right) > _MOST_GROWTH:
            raise jinja2.TemplateError(f"{operator} makes too large a value of its operands")
        return super().call_binop(context, operator, left, right)

    def _check_time(self) -> None:
        if self.clock.now_us() > self._ends_us:
            raise jinja2.TemplateError(f"it does not end within {_LONGEST_US // 1_000_000} s")


def _growth(operator: str, left: Any, right: Any) -> int:
    """Return about how long a product or a power is: in bits, or in entries."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits * abs(right) if operator == "**" else bits + right.bit_length()
    count, many = (left, right) if isinstance(left, int) else (right, left)
    return count * len(many) if isinstance(count, int) and isinstance(many, Sequence) else 0


class ChatTemplate:
    """A compiled template."""

    __slots__ = ("_environment", "_template", "_tokens")

    def __init__(
        self, source: str, *, bos_token: str, eos_token: str, clock: SystemClock | None = None
    ) -> None:
        """Compile `source`. Raises ConfigError where it is no template."""
        wall = clock or SystemClock()

        def strftime_now(layout: str) -> str:
            return datetime.datetime.fromtimestamp(wall.wall_s()).strftime(layout)

        self._environment = environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.filters[_TIMED] = environment.timed
        environment.clock = wall
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = strftime_now
        setting = "chat template (see --chat-template)"
        try:
            tree = environment.parse(source)
            for loop in tree.find_all(jinja2.nodes.For):
                loop.iter = jinja2.nodes.Filter(loop.iter, _TIMED, [], [], None, None)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                setting, f"line {error.lineno} is no Jinja: {error.message}"
            ) from error
        except (RecursionError, MemoryError, SyntaxError):  # Python's, of what Jinja makes of it
            raise ConfigError(setting, "its blocks or brackets are nested too deeply") from None
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
    ) -> str:
        """Return the prompt of the conversation; `variables` are what its client adds.

        Raises RequestError 400 where the template refuses it or cannot cope with it.
        """
        self._environment.begin()
        try:
            return self._template.render(
                {
                    **variables,
                    **self._tokens,
                    "tools": tools or None,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        # A template computes with what a client wrote, so it can fail as any program can.
        except Exception as error:
            raise RequestError(
                400,
                f"the model's chat template refuses these messages: {excerpt(str(error))}",
                param="messages",
                code="invalid_messages",
            ) from error

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
    ) -> str:
        """Return the prompt whose last message is not ended, so that an answer continues it.

        Raises RequestError 400 as `render` does, and where the template drops the message.
        """
        last = messages[-1]
        marked = {**last, "content": last["content"] + _END}
        prompt = self.render(
            [*messages[:-1], marked],
            add_generation_prompt=False,
            tools=tools,
            variables=variables,
        )
        end = prompt.rfind(_END)
        if end < 0:
            raise RequestError(
                400,
                "continue_final_message: the chat template does not show the final message",
                param="continue_final_message",
                code="invalid_messages",
            )
        return prompt[:end].replace(_END, "")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and non-ASCII, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
