"""POST /v1/chat/completions: conversations in, the assistant's turn out."""

from collections.abc import Sequence
from typing import Any

import msgspec

from drumline.core.errors import RequestError
from drumline.frontend.generation import Asked, Piece, TokenLogprob, Usage
from drumline.frontend.openai.calls import (
    Answer,
    Frame,
    asked_of,
    encoded,
    usage_body,
    usage_field,
)
from drumline.frontend.openai.sampling import answer_length, logprob_count
from drumline.frontend.openai.schema import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    Message,
    SamplingFields,
    TopLogprob,
)
from drumline.frontend.service import Service
from drumline.frontend.text.chat_template import ChatTemplate
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.frontend.web.incoming import decode_json

_decoder = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode

_ROLES = {
    "system": "system",
    "developer": "system",  # the newer name; templates know the older one
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class ChatCall:
    """One decoded chat request."""

    def __init__(self, body: bytes, tokenizer: Tokenizer) -> None:
        """Decode `body`. Raises RequestError 400 naming the field that does not fit."""
        self._request = decode_json(body, _decoder)
        self._tokenizer = tokenizer

    @property
    def fields(self) -> SamplingFields:
        return self._request

    async def asked(self, service: Service) -> Asked:
        request = self._request
        messages = template_messages(request.messages)
        if service.template is None:
            raise RequestError(
                400,
                f"{service.model} has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        prompt = self._prompt(service.template, messages)
        ids = await encoded(service, prompt, add_special=False, param="messages")
        newer = request.max_completion_tokens is not None
        max_param = "max_completion_tokens" if newer else "max_tokens"
        asked_tokens = request.max_completion_tokens if newer else request.max_tokens
        return asked_of(
            service,
            request,
            [ids],
            param="messages",
            max_param=max_param,
            max_tokens=answer_length(max_param, asked_tokens),
            logprobs=self._logprobs(),
        )

    def _prompt(self, template: ChatTemplate, messages: Sequence[dict[str, Any]]) -> str:
        request = self._request
        variables = self._variables()
        if not request.continue_final_message:
            return template.render(
                messages,
                add_generation_prompt=request.add_generation_prompt is not False,
                variables=variables,
            )
        if request.add_generation_prompt:
            raise _not_continued(
                "add_generation_prompt begins a new message", "invalid_combination"
            )
        last = messages[-1]
        if last["role"] != "assistant" or not last["content"]:
            raise _not_continued("the final message is not the assistant's, or has no text")
        return template.render_open(messages, variables=variables)

    def _variables(self) -> dict[str, Any]:
        """Return what the template is told beside the messages."""
        effort = self._request.reasoning_effort
        own = {} if effort is None else {"reasoning_effort": effort}
        return own | (self._request.chat_template_kwargs or {})

    def opening(self, frame: Frame, answers: int, usage: Usage) -> list[bytes]:
        return [
            self._chunk(frame, ChatChunkChoice(index, ChatDelta("assistant", "")), usage)
            for index in range(answers)
        ]

    def events(self, frame: Frame, piece: Piece, usage: Usage | None) -> list[bytes]:
        events = []
        if piece.text or piece.logprobs:
            choice = ChatChunkChoice(
                piece.index, ChatDelta(content=piece.text), self._logprob_bodies(piece.logprobs)
            )
            events.append(self._chunk(frame, choice, usage))
        if piece.finish_reason is not None:
            choice = ChatChunkChoice(
                piece.index,
                ChatDelta(),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
            )
            events.append(self._chunk(frame, choice, usage))
        return events

    def usage_event(self, frame: Frame, usage: Usage) -> bytes:
        return _encode(ChatChunk(frame.id, frame.created, frame.model, [], usage_body(usage)))

    def whole(self, frame: Frame, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [
            ChatChoice(
                index,
                AssistantMessage(answer.text),
                answer.finish_reason,
                self._logprob_bodies(answer.logprobs),
                answer.stop_reason,
            )
            for index, answer in enumerate(answers)
        ]
        return _encode(ChatBody(frame.id, frame.created, frame.model, choices, usage_body(usage)))

    def _chunk(self, frame: Frame, choice: ChatChunkChoice, usage: Usage | None) -> bytes:
        return _encode(
            ChatChunk(
                frame.id, frame.created, frame.model, [choice], usage_field(self._request, usage)
            )
        )

    def _logprobs(self) -> int | None:
        request = self._request
        top = request.top_logprobs
        if top is not None:
            logprob_count("top_logprobs", top)
            if top and not request.logprobs:
                raise RequestError(
                    400, "top_logprobs needs logprobs to be true", param="top_logprobs",
                    code="invalid_combination",
                )  # fmt: skip
        return (top or 0) if request.logprobs else None

    def _logprob_bodies(self, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        piece = self._tokenizer.piece
        content = []
        for drawn in logprobs:
            data = piece(drawn.token_id)
            top = [
                TopLogprob(piece(id_).decode(errors="replace"), value, list(piece(id_)))
                for id_, value in drawn.top
            ]
            content.append(
                ChatLogprob(data.decode(errors="replace"), drawn.logprob, list(data), top)
            )
        return ChatLogprobs(content)


def _not_continued(why: str, code: str = "invalid_value") -> RequestError:
    param = "continue_final_message"
    return RequestError(400, f"{param}: {why}", param=param, code=code)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as chat templates take them, every content one string.

    Raises RequestError 400 naming the first thing that no template could take.
    """
    if not messages:
        raise RequestError(
            400, "messages is empty; at least one message is needed", param="messages",
            code="empty_array",
        )  # fmt: skip
    return [_template_message(f"messages[{index}]", turn) for index, turn in enumerate(messages)]


def _template_message(name: str, message: Message) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestError(
            400,
            f"{name}.role is {message.role!r}; known roles: {', '.join(_ROLES)}",
            param=f"{name}.role",
            code="invalid_value",
        )
    extras = {
        "name": message.name,
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
    }
    return {
        "role": role,
        "content": _text(name, message),
        **{key: value for key, value in extras.items() if value is not None},
    }


def _text(name: str, message: Message) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise RequestError(
                400, f"{name}.content is missing", param=f"{name}.content",
                code="missing_required_parameter",
            )  # fmt: skip
        return ""
    texts = []
    for index, part in enumerate(content):
        where = f"{name}.content[{index}]"
        if part.type != "text":
            raise RequestError(
                400,
                f"{where}.type is {part.type!r}; this model takes 'text' only",
                param=f"{where}.type",
                code="unsupported_content_part",
            )
        if part.text is None:
            raise RequestError(
                400, f"{where}.text is missing", param=f"{where}.text",
                code="missing_required_parameter",
            )  # fmt: skip
        texts.append(part.text)
    return "\n".join(texts)
