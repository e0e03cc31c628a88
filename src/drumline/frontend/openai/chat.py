"""POST /v1/chat/completions: conversations in, the assistant's turn out."""

import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from drumline.frontend.answer import Asked, Piece
from drumline.frontend.generation import Usage
from drumline.frontend.logprobs import TokenLogprob
from drumline.frontend.openai.calls import (
    Answer,
    Frame,
    metadata_of,
    prompt_logprobs,
    usage_body,
    usage_field,
    usage_grows,
)
from drumline.frontend.openai.schema import (
    AssistantMessage,
    CalledFunction,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    FunctionDelta,
    SamplingFields,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from drumline.frontend.openai.turn import ChatTurn
from drumline.frontend.parts.part import Arguments, CallBegun, Part, Reasoning, Words
from drumline.frontend.service import Service
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.frontend.web.incoming import decode_json
from drumline.frontend.web.template import EventTemplate

_decoder = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode


class ChatCall:
    """One decoded chat request."""

    def __init__(self, body: bytes, tokenizer: Tokenizer) -> None:
        """Decode `body`. Raises RequestError 400 naming the field that does not fit."""
        self._request = decode_json(body, _decoder)
        self._turn = ChatTurn(self._request)
        self._tokenizer = tokenizer
        self._tells_ids = bool(self._request.return_token_ids)
        self._prompt_ids: Sequence[int] = ()
        self._steady = not usage_grows(self._request) and not self._tells_ids
        self._plain: dict[int, EventTemplate] = {}
        """Events of words alone, by the answer's index."""

    @property
    def fields(self) -> SamplingFields:
        return self._request

    async def asked(self, service: Service) -> Asked:
        asked = await self._turn.asked(service)
        self._prompt_ids = asked.prompts[0]
        return asked

    def opening(self, frame: Frame, answers: int, usage: Usage) -> list[bytes]:
        chunks = [
            self._body(frame, ChatChunkChoice(index, ChatDelta("assistant", "")), usage)
            for index in range(answers)
        ]
        if self._tells_ids:
            chunks[0].prompt_token_ids = self._prompt_ids
        return [_encode(chunk) for chunk in chunks]

    def events(self, frame: Frame, piece: Piece, usage: Usage | None) -> list[bytes]:
        parts = self._turn.parts(piece)
        if self._steady and len(parts) == 1 and piece.finish_reason is None and not piece.logprobs:
            part = parts[0]
            if isinstance(part, Words):
                return [self._words_event(frame, piece.index, part.text)]
        deltas = self._deltas(parts)
        ids = piece.token_ids if self._tells_ids and piece.token_ids else UNSET
        if (piece.logprobs or ids is not UNSET) and not deltas:
            deltas = [ChatDelta(content="")]  # the tokens' text comes later, or is a mark
        logprobs = self._logprob_bodies(piece.logprobs)
        events = []
        for delta in deltas:
            choice = ChatChunkChoice(piece.index, delta, logprobs, token_ids=ids)
            events.append(self._chunk(frame, choice, usage))
            logprobs, ids = None, UNSET
        if piece.finish_reason is not None:
            choice = ChatChunkChoice(
                piece.index,
                ChatDelta(),
                finish_reason=self._turn.finish_reason(piece.index, piece.finish_reason),
                stop_reason=piece.stop_reason,
            )
            last = self._body(frame, choice, usage)
            last.metadata = metadata_of(piece)
            events.append(_encode(last))
        return events

    def _words_event(self, frame: Frame, index: int, text: str) -> bytes:
        template = self._plain.get(index)
        if template is None:
            template = self._plain[index] = EventTemplate(
                lambda text: self._body(frame, ChatChunkChoice(index, ChatDelta(content=text)))
            )
        return template.filled(text)

    def usage_event(self, frame: Frame, usage: Usage) -> bytes:
        return _encode(ChatChunk(frame.id, frame.created, frame.model, [], usage_body(usage)))

    def whole(self, frame: Frame, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = []
        for index, answer in enumerate(answers):
            parts = self._turn.whole(index, answer)
            choices.append(
                ChatChoice(
                    index,
                    self._message(parts),
                    self._turn.finish_reason(index, answer.finish_reason),
                    self._logprob_bodies(answer.logprobs),
                    answer.stop_reason,
                    answer.token_ids if self._tells_ids else UNSET,
                )
            )
        body = ChatBody(frame.id, frame.created, frame.model, choices, usage_body(usage))
        body.prompt_logprobs = prompt_logprobs(answers[0].prompt, self._tokenizer)
        body.metadata = metadata_of(*answers)
        if self._tells_ids:
            body.prompt_token_ids = self._prompt_ids
        return _encode(body)

    def _message(self, parts: Sequence[Part]) -> AssistantMessage:
        words, reasoning = "", ""
        calls: list[ToolCall] = []
        for part in parts:
            match part:
                case Words(text):
                    words += text
                case Reasoning(text):
                    reasoning += text
                case CallBegun(_, name):
                    calls.append(ToolCall(CalledFunction(name, ""), _call_id()))
                case Arguments(call, text):
                    function = calls[call].function
                    function.arguments = f"{function.arguments}{text}"
        if self._request.include_reasoning is False:
            reasoning = ""
        return AssistantMessage(
            None if (calls or reasoning) and not words.strip() else words,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def _deltas(self, parts: Sequence[Part]) -> list[ChatDelta]:
        deltas = []
        for part in parts:
            match part:
                case Words(text):
                    deltas.append(ChatDelta(content=text))
                case Reasoning(text):
                    if self._request.include_reasoning is not False:
                        deltas.append(ChatDelta(reasoning_content=text))
                case CallBegun(call, name):
                    begun = ToolCallDelta(call, FunctionDelta("", name), _call_id(), "function")
                    deltas.append(ChatDelta(tool_calls=[begun]))
                case Arguments(call, text):
                    grown = ToolCallDelta(call, FunctionDelta(text))
                    deltas.append(ChatDelta(tool_calls=[grown]))
        return deltas

    def _chunk(self, frame: Frame, choice: ChatChunkChoice, usage: Usage | None) -> bytes:
        return _encode(self._body(frame, choice, usage))

    def _body(self, frame: Frame, choice: ChatChunkChoice, usage: Usage | None = None) -> ChatChunk:
        used = usage_field(self._request, usage)
        return ChatChunk(frame.id, frame.created, frame.model, [choice], used)

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


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
