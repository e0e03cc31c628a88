"""POST /v1/responses."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from drumline.frontend.answer import Asked, Piece
from drumline.frontend.generation import Usage
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
from drumline.frontend.responses.request import as_chat
from drumline.frontend.responses.schema import (
    FunctionCallItem,
    Incomplete,
    InputDetails,
    MessageItem,
    OutputDetails,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningOptions,
    ReasoningText,
    ResponseBody,
    ResponseEvent,
    ResponsesRequest,
    ResponseUsage,
    TextFormat,
    TextOptions,
)
from drumline.frontend.service import Service
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.frontend.web.incoming import decode_json

_decoder = msgspec.json.Decoder(ResponsesRequest)
_encode = msgspec.json.Encoder().encode

_PREFIXES = {SectionKind.TEXT: "msg", SectionKind.REASONING: "rs", SectionKind.CALL: "fc"}
_NAMES = {
    SectionKind.TEXT: "response.output_text",
    SectionKind.REASONING: "response.reasoning_text",
    SectionKind.CALL: "response.function_call_arguments",
}
_RUNNING = "in_progress"
_COMPLETE = "completed"
_INCOMPLETE = "incomplete"
_REASONS = {"length": "max_output_tokens"}


class ResponsesCall:
    """One decoded request."""

    def __init__(self, body: bytes, tokenizer: Tokenizer) -> None:
        """Decode `body`. Raises RequestError 400 naming the field that does not fit."""
        self._request = decode_json(body, _decoder)
        self._turn = ChatTurn(as_chat(self._request))
        self._sections = Sections(_PREFIXES)
        self._sent = 0

    @property
    def fields(self) -> SamplingFields:
        return self._turn.request

    async def asked(self, service: Service) -> Asked:
        return await self._turn.asked(service)

    def opening(self, frame: Frame, answers: int, usage: Usage) -> list[bytes]:
        body = self._body(frame, _RUNNING)
        return [self._event(f"response.{kind}", response=body) for kind in ("created", _RUNNING)]

    def events(self, frame: Frame, piece: Piece, usage: Usage | None) -> list[bytes]:
        found = self._sections.add(self._turn.parts(piece))
        if piece.finish_reason is not None:
            found += self._sections.finish()
        events = [written for each in found for written in self._written(each)]
        if piece.finish_reason is not None:
            version = piece.weight_version
            body = self._ended(frame, piece.finish_reason, usage or Usage(), version)
            events.append(self._event(f"response.{body.status}", response=body))
        return events

    def usage_event(self, frame: Frame, usage: Usage) -> bytes:
        raise AssertionError("its events say what it cost")

    def whole(self, frame: Frame, answers: Sequence[Answer], usage: Usage) -> bytes:
        (answer,) = answers
        self._sections.add(self._turn.whole(0, answer))
        return _encode(self._ended(frame, answer.finish_reason, usage, answer.weight_version))

    def _ended(self, frame: Frame, reason: str, usage: Usage, version: str) -> ResponseBody:
        complete = reason == "stop"
        return replace(
            self._body(frame, _COMPLETE if complete else _INCOMPLETE),
            output=[_item(section, _COMPLETE) for section in self._sections.sections],
            incomplete_details=None if complete else Incomplete(_REASONS.get(reason, reason)),
            usage=ResponseUsage(
                usage.prompt_tokens,
                InputDetails(usage.cached_tokens),
                usage.completion_tokens,
                OutputDetails(),
                usage.prompt_tokens + usage.completion_tokens,
            ),
            weight_version=version or UNSET,
        )

    def _body(self, frame: Frame, status: str) -> ResponseBody:
        request = self._request
        return ResponseBody(
            id=frame.id,
            created_at=frame.created,
            status=status,
            model=frame.model,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning=request.reasoning or ReasoningOptions(),
            temperature=request.temperature,
            text=request.text or TextOptions(format=TextFormat()),
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_p=request.top_p,
        )

    def _written(self, event: SectionEvent) -> list[bytes]:
        section = event.section
        place: dict[str, Any] = {"output_index": section.index, "item_id": section.id}
        if section.kind is not SectionKind.CALL:
            place["content_index"] = 0
        name = _NAMES[section.kind]
        match event:
            case Began():
                return self._began(section, place)
            case Grew(_, text):
                extra: dict[str, Any] = {"logprobs": []} if section.kind is SectionKind.TEXT else {}
                return [self._event(f"{name}.delta", delta=text, **place, **extra)]
            case Ended():
                return self._section_ended(section, place, f"{name}.done")

    def _began(self, section: Section, place: dict[str, Any]) -> list[bytes]:
        empty = Section(section.index, section.kind, section.name, section.id)
        item = _item(empty, _RUNNING)
        if not isinstance(item, FunctionCallItem):
            item.content = []
        added = self._event("response.output_item.added", item=item, output_index=section.index)
        if section.kind is SectionKind.CALL:
            return [added]
        return [added, self._event("response.content_part.added", part=_part(empty), **place)]

    def _section_ended(self, section: Section, place: dict[str, Any], name: str) -> list[bytes]:
        # In the order in which they are sent, as each takes the next number.
        if section.kind is SectionKind.CALL:
            said = {"arguments": section.text, "name": section.name}
            events = [self._event(name, **said, **place)]
        else:
            extra: dict[str, Any] = {"logprobs": []} if section.kind is SectionKind.TEXT else {}
            events = [
                self._event(name, text=section.text, **place, **extra),
                self._event("response.content_part.done", part=_part(section), **place),
            ]
        item = _item(section, _COMPLETE)
        done = self._event("response.output_item.done", item=item, output_index=section.index)
        return [*events, done]

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = ResponseEvent(type=kind, sequence_number=self._sent, **fields)
        self._sent += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encode(event)


def _item(section: Section, status: str) -> OutputItem:
    match section.kind:
        case SectionKind.TEXT:
            return MessageItem(section.id, [OutputText(section.text)], status)
        case SectionKind.REASONING:
            return ReasoningItem(section.id, [ReasoningText(section.text)], status)
        case SectionKind.CALL:
            return FunctionCallItem(
                section.id, section.id.replace("fc", "call", 1), section.name, section.text, status
            )


def _part(section: Section) -> OutputText | ReasoningText:
    if section.kind is SectionKind.TEXT:
        return OutputText(section.text)
    return ReasoningText(section.text)
