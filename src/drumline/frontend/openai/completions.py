"""POST /v1/completions: texts or token ids in, what follows them out."""

from collections.abc import Sequence

import msgspec

from drumline.core.errors import RequestError
from drumline.frontend.generation import Asked, Piece, TokenLogprob, Usage
from drumline.frontend.limits import MAX_SEQUENCES
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
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    SamplingFields,
)
from drumline.frontend.service import Service
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.frontend.web.incoming import decode_json

DEFAULT_MAX_TOKENS = 16
"""How long an answer is that names no length; OpenAI's own default for this route."""

_decoder = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode


class CompletionCall:
    """One decoded completion request."""

    def __init__(self, body: bytes, tokenizer: Tokenizer) -> None:
        """Decode `body`. Raises RequestError 400 naming the field that does not fit."""
        self._request = decode_json(body, _decoder)
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}

    @property
    def fields(self) -> SamplingFields:
        return self._request

    async def asked(self, service: Service) -> Asked:
        request = self._request
        prompts = []
        for prompt in self._prompts():
            if isinstance(prompt, str):
                prompts.append(await encoded(service, prompt, add_special=True, param="prompt"))
            else:
                service.limits.check_ids(prompt, "prompt")
                prompts.append(prompt)
        length = answer_length("max_tokens", request.max_tokens)
        return asked_of(
            service,
            request,
            prompts,
            param="prompt",
            max_param="max_tokens",
            max_tokens=self._fitting_default(service, prompts) if length is None else length,
            logprobs=(
                None if request.logprobs is None else logprob_count("logprobs", request.logprobs)
            ),
        )

    def opening(self, frame: Frame, answers: int, usage: Usage) -> list[bytes]:
        return []

    def events(self, frame: Frame, piece: Piece, usage: Usage | None) -> list[bytes]:
        choices = []
        if piece.text or piece.logprobs:
            choices.append(
                CompletionChoice(
                    piece.index, piece.text, self._logprob_body(piece.index, piece.logprobs)
                )
            )
        if piece.finish_reason is not None:
            choices.append(
                CompletionChoice(
                    piece.index,
                    "",
                    finish_reason=piece.finish_reason,
                    stop_reason=piece.stop_reason,
                )
            )
        return [
            _encode(
                CompletionBody(
                    frame.id,
                    frame.created,
                    frame.model,
                    [choice],
                    usage_field(self._request, usage),
                )
            )
            for choice in choices
        ]

    def usage_event(self, frame: Frame, usage: Usage) -> bytes:
        return _encode(CompletionBody(frame.id, frame.created, frame.model, [], usage_body(usage)))

    def whole(self, frame: Frame, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [
            CompletionChoice(
                index,
                answer.text,
                self._logprob_body(index, answer.logprobs),
                answer.finish_reason,
                answer.stop_reason,
            )
            for index, answer in enumerate(answers)
        ]
        return _encode(
            CompletionBody(frame.id, frame.created, frame.model, choices, usage_body(usage))
        )

    def _prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts one by one. Raises RequestError 400 for a mixed or empty list."""
        prompt = self._request.prompt
        if isinstance(prompt, str):
            return [prompt]
        if len(prompt) > MAX_SEQUENCES and not isinstance(prompt[0], int):
            raise RequestError(
                400, f"prompt has {len(prompt)} entries; {MAX_SEQUENCES} are allowed",
                param="prompt", code="array_above_max_length",
            )  # fmt: skip
        ids = [entry for entry in prompt if isinstance(entry, int)]
        texts = [entry for entry in prompt if isinstance(entry, str)]
        lists = [entry for entry in prompt if isinstance(entry, list)]
        if texts and not ids and not lists:
            return texts
        if lists and not ids and not texts:
            return lists
        if texts or lists:
            raise RequestError(
                400, "prompt mixes texts, token ids and lists of them; it must be of one kind",
                param="prompt", code="invalid_type",
            )  # fmt: skip
        return [ids]

    def _fitting_default(self, service: Service, prompts: Sequence[list[int]]) -> int:
        longest = max(map(len, prompts), default=0)
        return max(1, min(DEFAULT_MAX_TOKENS, service.limits.room - longest))

    def _logprob_body(
        self, index: int, logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None

        def text(token_id: int) -> str:
            return self._tokenizer.piece(token_id).decode(errors="replace")

        tokens = [text(drawn.token_id) for drawn in logprobs]
        offsets = []
        position = self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(position)
            position += len(token)
        self._offsets[index] = position
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[drawn.logprob for drawn in logprobs],
            top_logprobs=(
                [{text(id_): value for id_, value in drawn.top} for drawn in logprobs]
                if self._request.logprobs
                else None
            ),
            text_offset=offsets,
        )
