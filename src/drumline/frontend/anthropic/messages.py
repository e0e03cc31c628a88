"""POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from drumline.frontend.answer import Asked, Piece
from drumline.frontend.anthropic.request import as_chat, count_as_chat
from drumline.frontend.anthropic.schema import (
    Count,
    CountRequest,
    Delta,
    Event,
    MessageBody,
    MessagesRequest,
    StopDelta,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    Usage,
)
from drumline.frontend.generation import Usage as Cost
from drumline.frontend.openai.calls import Answer, Frame
from drumline.frontend.openai.schema import SamplingFields
from drumline.frontend.openai.turn import ChatTurn
from drumline.frontend.parts.sections import (
    Began,
    Ended,
    Grew,
    Section,
    SectionEvent,
    SectionKind,
    Sections,
)
from drumline.frontend.service import Service
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.frontend.web.incoming import decode_json
from drumline.frontend.web.reply import Reply

_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)
_encode = msgspec.json.Encoder().encode

_PREFIXES = {SectionKind.TEXT: "text", SectionKind.REASONING: "thinking", SectionKind.CALL: "toolu"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesCall:
    """One decoded request."""

    def __init__(self, body: bytes, tokenizer: Tokenizer) -> None:
        """Decode `body`. Raises RequestError 400 naming the field that does not fit."""
        self._turn = ChatTurn(as_chat(decode_json(body, _decoder)))
        self._sections = Sections(_PREFIXES)

    @property
    def fields(self) -> SamplingFields:
        return self._turn.request

    async def asked(self, service: Service) -> Asked:
        return await self._turn.asked(service)

    def opening(self, frame: Frame, answers: int, usage: Cost) -> list[bytes]:
        message = MessageBody(frame.id, frame.model, [], _usage(usage))
        return [_event("message_start", message=message)]

    def events(self, frame: Frame, piece: Piece, usage: Cost | None) -> list[bytes]:
        found = self._sections.add(self._turn.parts(piece))
        if piece.finish_reason is None:
            return [event for each in found for event in _written(each)]
        found += self._sections.finish()
        stop = self._stop(piece.finish_reason, piece.stop_reason)
        return [
            *(event for each in found for event in _written(each)),
            _event(
                "message_delta",
                delta=stop,
                usage=_usage(usage or Cost()),
                weight_version=piece.weight_version or UNSET,
            ),
            _event("message_stop"),
        ]

    def usage_event(self, frame: Frame, usage: Cost) -> bytes:
        raise AssertionError("its events say what it cost")

    def whole(self, frame: Frame, answers: Sequence[Answer], usage: Cost) -> bytes:
        (answer,) = answers
        self._sections.add(self._turn.whole(0, answer))
        stop = self._stop(answer.finish_reason, answer.stop_reason)
        return _encode(
            MessageBody(
                frame.id,
                frame.model,
                [_body(section) for section in self._sections.sections],
                _usage(usage),
                stop.stop_reason,
                stop.stop_sequence,
                weight_version=answer.weight_version or UNSET,
            )
        )

    def _stop(self, reason: str, matched: str | int | None) -> StopDelta:
        if reason == "stop" and isinstance(matched, str):
            return StopDelta("stop_sequence", matched)
        reason = self._turn.finish_reason(0, reason)
        return StopDelta(_REASONS.get(reason, reason), None)


class TokenCount:
    """POST /v1/messages/count_tokens."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def count(self, body: bytes, reply: Reply) -> None:
        """Answer how many tokens the prompt of a request has."""
        service = self._service
        await service.turns.mine()
        request = decode_json(body, _count_decoder)
        service.check_model(request.model)
        ids = await ChatTurn(count_as_chat(request)).prompt(service)
        await reply.body(_encode(Count(len(ids))))


def _written(event: SectionEvent) -> list[bytes]:
    match event:
        case Began(section):
            # Sections begin without text, which comes as deltas.
            empty = Section(section.index, section.kind, section.name, section.id, "")
            return [_event("content_block_start", index=section.index, content_block=_body(empty))]
        case Grew(section, text):
            return [_event("content_block_delta", index=section.index, delta=_delta(section, text))]
        case Ended(section):
            events = []
            if section.kind is SectionKind.REASONING:
                signed = Delta(type="signature_delta", signature="")
                events.append(_event("content_block_delta", index=section.index, delta=signed))
            return [*events, _event("content_block_stop", index=section.index)]


def _delta(section: Section, text: str) -> Delta:
    match section.kind:
        case SectionKind.TEXT:
            return Delta(type="text_delta", text=text)
        case SectionKind.REASONING:
            return Delta(type="thinking_delta", thinking=text)
        case SectionKind.CALL:
            return Delta(type="input_json_delta", partial_json=text)


def _body(section: Section) -> TextBlock | ThinkingBlock | ToolUseBlock:
    match section.kind:
        case SectionKind.TEXT:
            return TextBlock(section.text)
        case SectionKind.REASONING:
            return ThinkingBlock(section.text)
        case SectionKind.CALL:
            return ToolUseBlock(section.id, section.name, _input(section.text))


def _input(text: str) -> Any:
    """Return a call's arguments; what a model left unfinished, as the text that it is."""
    try:
        return msgspec.json.decode(text or b"{}")
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return {"unreadable": text}


def _usage(usage: Cost) -> Usage:
    cached = usage.cached_tokens
    return Usage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode(Event(type=kind, **fields))
