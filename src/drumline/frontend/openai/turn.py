"""The assistant's next turn: from a chat request to what the engine is asked, and to its parts.

It knows no dialect's replies; every dialect that speaks in turns is brought into a `ChatRequest`.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from drumline.core.errors import RequestError
from drumline.frontend.answer import Asked, Piece
from drumline.frontend.openai.calls import Answer, asked_of, encoded
from drumline.frontend.openai.grammar import grammar_params
from drumline.frontend.openai.held import behind_reasoning
from drumline.frontend.openai.messages import template_messages
from drumline.frontend.openai.sampling import answer_length, logprob_count, prompt_logprob_count
from drumline.frontend.openai.schema import ChatRequest
from drumline.frontend.openai.tools import ToolUse, tool_use
from drumline.frontend.parts.part import Part
from drumline.frontend.parts.reader import AnswerReader, Reading
from drumline.frontend.parts.reasoning import BEGIN, END
from drumline.frontend.service import Service
from drumline.frontend.text.chat_template import ChatTemplate


class ChatTurn:
    """One chat request, and the parts of its answers as they come."""

    __slots__ = ("_readers", "_reading", "request")

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self._reading = Reading()
        self._readers: dict[int, AnswerReader] = {}

    async def prompt(self, service: Service) -> list[int]:
        """Return the prompt's ids. Raises RequestError 400 naming what is wrong with it."""
        _, ids, _ = await self._prompt(service)
        return ids

    async def asked(self, service: Service) -> Asked:
        """Check the request and encode its prompt. Raises RequestError 400."""
        request = self.request
        text, ids, tools = await self._prompt(service)
        held = tools.held is not None
        if held and grammar_params(request):
            raise RequestError(
                400, "tool_choice: the answer is held to another form at the same time",
                param="tool_choice", code="invalid_combination",
            )  # fmt: skip
        newer = request.max_completion_tokens is not None
        max_param = "max_completion_tokens" if newer else "max_tokens"
        asked_tokens = request.max_completion_tokens if newer else request.max_tokens
        asked = asked_of(
            service,
            request,
            [ids],
            param="messages",
            max_param=max_param,
            max_tokens=answer_length(max_param, asked_tokens),
            logprobs=self._logprobs(),
            prompt_logprobs=prompt_logprob_count(request),
        )
        sampling = asked.sampling
        if tools.held is not None:
            sampling = replace(sampling, structural_tag=tools.held.source)
        reasons, opened = service.form.reasons, service.form.reasons and self._opened(text)
        if tools.forced or grammar_params(request):
            # What is held to a form has it from its first token on, unless it can come later.
            later = behind_reasoning(sampling) if opened else None
            sampling = sampling if later is None else later
            reasons = later is not None
        reasons = reasons and request.separate_reasoning is not False
        self._reading = Reading(
            reasons=reasons,
            opened=opened,
            calls=tools.format,
            tools=tools.schemas,
            most_calls=tools.most,
        )
        looks = reasons or tools.format is not None
        return replace(asked, sampling=sampling, shown=service.mark_ids if looks else frozenset())

    def parts(self, piece: Piece) -> list[Part]:
        """Return what `piece` adds to its answer. Pieces of one answer come in order."""
        reader = self._reader(piece.index)
        parts = reader.add(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            parts += reader.finish()
        return parts

    def whole(self, index: int, answer: Answer) -> list[Part]:
        """Return the parts of an answer that comes in one piece."""
        return self.parts(Piece(index, answer.text, finish_reason=answer.finish_reason))

    def finish_reason(self, index: int, reason: str) -> str:
        """Return why an answer ended: calls of tools end it as much as its end does."""
        return "tool_calls" if reason == "stop" and self._reader(index).called else reason

    def _reader(self, index: int) -> AnswerReader:
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = AnswerReader(self._reading)
        return reader

    async def _prompt(self, service: Service) -> tuple[str, list[int], ToolUse]:
        messages = template_messages(self.request.messages)
        if service.template is None:
            raise RequestError(
                400,
                f"{service.model} has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        tools = tool_use(self.request, service.form)
        text = self._rendered(service.template, messages, tools.told)
        ids = await encoded(
            service,
            text,
            add_special=bool(self.request.add_special_tokens),  # a template writes its own
            param="messages",
            shortens=self.request.truncate_prompt_tokens is not None,
        )
        return text, ids, tools

    def _rendered(
        self,
        template: ChatTemplate,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
    ) -> str:
        request = self.request
        variables = self._variables()
        if not request.continue_final_message:
            return template.render(
                messages,
                add_generation_prompt=request.add_generation_prompt is not False,
                tools=tools,
                variables=variables,
            )
        if request.add_generation_prompt:
            raise _not_continued(
                "add_generation_prompt begins a new message", "invalid_combination"
            )
        last = messages[-1]
        if last["role"] != "assistant" or not last["content"]:
            raise _not_continued("the final message is not the assistant's, or has no text")
        return template.render_open(messages, tools=tools, variables=variables)

    def _variables(self) -> dict[str, Any]:
        """Return what the template is told beside the messages."""
        effort = self.request.reasoning_effort
        own = {} if effort is None else {"reasoning_effort": effort}
        return own | (self.request.chat_template_kwargs or {})

    def _opened(self, prompt: str) -> bool:
        """Whether the prompt ends inside of reasoning."""
        if self.request.continue_final_message:
            return prompt.rfind(BEGIN) > prompt.rfind(END)
        return prompt.rstrip().endswith(BEGIN)

    def _logprobs(self) -> int | None:
        request = self.request
        top = request.top_logprobs
        if top is not None:
            logprob_count("top_logprobs", top)
            if top and not request.logprobs:
                raise RequestError(
                    400, "top_logprobs needs logprobs to be true", param="top_logprobs",
                    code="invalid_combination",
                )  # fmt: skip
        return (top or 0) if request.logprobs else None


def _not_continued(why: str, code: str = "invalid_value") -> RequestError:
    param = "continue_final_message"
    return RequestError(400, f"{param}: {why}", param=param, code=code)
