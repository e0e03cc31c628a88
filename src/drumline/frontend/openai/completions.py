"""POST /v1/completions: texts or token ids in, what follows them out."""

import math
from collections.abc import Sequence

import msgspec

from drumline.core.errors import RequestError
from drumline.frontend.answer import Asked, Piece
from drumline.frontend.generation import Usage
from drumline.frontend.limits import MAX_SEQUENCES
from drumline.frontend.logprobs import TokenLogprob
from drumline.frontend.openai.calls import (
    Answer,
    Frame,
    asked_of,
    ids_of,
    metadata_of,
    prompt_logprobs,
    usage_body,
    usage_field,
    usage_grows,
)
from drumline.frontend.openai.echo import Echo, EchoedPieces
from drumline.frontend.openai.sampling import (
    answer_length,
    generated_count,
    logprob_count,
    prompt_logprob_count,
)
from drumline.frontend.openai.schema import (
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    SamplingFields,
)
from drumline.frontend.service import Service
from drumline.frontend.text.detokenizer import decode
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.frontend.web.incoming import decode_json
from drumline.frontend.web.template import EventTemplate

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
        self._choices = 1
        self._echoed: EchoedPieces | None = None
        self._tells_ids = bool(self._request.return_token_ids)
        self._prompt_ids: Sequence[list[int]] = ()
        self._told_prompts: set[int] = set()
        """Answers of which the stream has told the prompt's ids."""
        self._steady = not usage_grows(self._request) and not self._tells_ids
        self._plain: dict[int, EventTemplate] = {}
        """Events of text alone, by the answer's index."""

    @property
    def fields(self) -> SamplingFields:
        return self._request

    async def asked(self, service: Service) -> Asked:
        request = self._request
        texts = self._prompts()
        special = request.add_special_tokens is not False
        shortens = request.truncate_prompt_tokens is not None
        prompts = await ids_of(
            service, texts, add_special=special, param="prompt", shortens=shortens
        )
        logprobs = request.logprobs
        if logprobs is not None:
            logprob_count("logprobs", logprobs)
        told = prompt_logprob_count(request)
        if request.echo and logprobs is not None:
            told = max(logprobs, told or 0)
        self._choices = generated_count(request)
        ranks = self._choices > (request.n or 1)
        asked = asked_of(
            service,
            request,
            prompts,
            param="prompt",
            max_param="max_tokens",
            max_tokens=self._length(service, prompts),
            logprobs=0 if ranks and logprobs is None else logprobs,
            prompt_logprobs=told,
            choices=self._choices,
        )
        self._prompt_ids = asked.prompts
        if request.echo:
            self._echoed = EchoedPieces(
                [
                    text if isinstance(text, str) and not shortens else self._spelled(ids)
                    for text, ids in zip(texts, asked.prompts, strict=True)
                ],
                asked.prompts,
                self._choices,
                with_tokens=logprobs is not None,
            )
        return asked

    def _length(self, service: Service, prompts: Sequence[list[int]]) -> int:
        """Return how long an answer may be; an engine makes one token where none is wanted."""
        asked = self._request.max_tokens
        if asked == 0 and self._request.echo:
            return 1
        length = answer_length("max_tokens", asked)
        return self._fitting_default(service, prompts) if length is None else length

    @property
    def _silent(self) -> bool:
        """Whether the prompt alone is wanted."""
        return self._request.max_tokens == 0

    def _reason(self, reason: str) -> str:
        return "length" if self._silent and reason != "abort" else reason

    def _spelled(self, ids: Sequence[int]) -> str:
        return decode(
            self._tokenizer, ids, skip_special=self._request.skip_special_tokens is not False
        )

    def opening(self, frame: Frame, answers: int, usage: Usage) -> list[bytes]:
        return []

    def events(self, frame: Frame, piece: Piece, usage: Usage | None) -> list[bytes]:
        if self._echoed is None:
            if self._steady and piece.finish_reason is None and not piece.logprobs:
                return [self._text_event(frame, piece)] if piece.text else []
            return self._events(frame, None, piece, usage)
        return [
            event
            for echo, each in self._echoed.ready(piece)
            for event in self._events(frame, echo, each, usage)
        ]

    def _text_event(self, frame: Frame, piece: Piece) -> bytes:
        index = piece.index
        template = self._plain.get(index)
        if template is None:
            usage = usage_field(self._request, None)
            template = self._plain[index] = EventTemplate(
                lambda text: CompletionBody(
                    frame.id, frame.created, frame.model, [CompletionChoice(index, text)], usage
                )
            )
        return template.filled(piece.text)

    def _events(
        self, frame: Frame, echo: Echo | None, piece: Piece, usage: Usage | None
    ) -> list[bytes]:
        index = piece.index
        choices = []
        if echo is not None:
            told = self._prompt_logprob_body(index, echo)
            choices.append(CompletionChoice(index, echo.text, told))
        tells = self._tells_ids and bool(piece.token_ids)
        if (piece.text or piece.logprobs or tells) and not self._silent:
            told = self._logprob_body(index, piece.logprobs)
            choices.append(CompletionChoice(index, piece.text, told))
        if piece.finish_reason is not None:
            choices.append(
                CompletionChoice(
                    index,
                    "",
                    finish_reason=self._reason(piece.finish_reason),
                    stop_reason=piece.stop_reason,
                )
            )
        if self._tells_ids:
            self._tell_ids(piece, choices)
        usage_so_far = usage_field(self._request, usage and self._counted(usage))
        bodies = [
            CompletionBody(frame.id, frame.created, frame.model, [choice], usage_so_far)
            for choice in choices
        ]
        if piece.finish_reason is not None:
            bodies[-1].metadata = metadata_of(piece)
        return [_encode(body) for body in bodies]

    def _tell_ids(self, piece: Piece, choices: Sequence[CompletionChoice]) -> None:
        """Put the ids of a piece into what is sent of it, with the prompt's where it is first."""
        for choice in choices[:1]:
            if piece.index not in self._told_prompts:
                self._told_prompts.add(piece.index)
                choice.prompt_token_ids = self._prompt_ids[piece.index // self._choices]
            choice.token_ids = () if self._silent else piece.token_ids

    def usage_event(self, frame: Frame, usage: Usage) -> bytes:
        cost = usage_body(self._counted(usage))
        return _encode(CompletionBody(frame.id, frame.created, frame.model, [], cost))

    def _counted(self, usage: Usage) -> Usage:
        return Usage(usage.prompt_tokens, 0, usage.cached_tokens) if self._silent else usage

    def whole(self, frame: Frame, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices: list[CompletionChoice] = []
        for first in range(0, len(answers), self._choices):
            best = answers[first : first + self._choices]
            told = best[0].prompt
            if self._echoed is not None:
                self._echoed.tell(first, told)
            if len(best) > (self._request.n or 1):
                best = sorted(best, key=_likelihood, reverse=True)[: self._request.n or 1]
            for answer in best:
                choices.append(self._choice(len(choices), first, answer, told))
        cost = usage_body(self._counted(usage))
        body = CompletionBody(frame.id, frame.created, frame.model, choices, cost)
        body.metadata = metadata_of(*answers)
        return _encode(body)

    def _choice(
        self,
        index: int,
        first: int,
        answer: Answer,
        told: Sequence[TokenLogprob | None] | None,
    ) -> CompletionChoice:
        """Return an answer as the choice of this index; `first` is its prompt's first answer."""
        reason = self._reason(answer.finish_reason)
        choice = CompletionChoice(index, "", None, reason, answer.stop_reason)
        bodies = []
        if self._echoed is not None:
            echo = self._echoed.echo(first)
            choice.text = echo.text
            bodies.append(self._prompt_logprob_body(index, echo, first))
        if not self._silent:
            choice.text += answer.text
            bodies.append(self._logprob_body(index, answer.logprobs))
        choice.logprobs = _joined([body for body in bodies if body is not None])
        if self._tells_ids:
            choice.token_ids = () if self._silent else answer.token_ids
            choice.prompt_token_ids = self._prompt_ids[first // self._choices]
        if self._request.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(told, self._tokenizer)
        return choice

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

    def _prompt_logprob_body(
        self, index: int, echo: Echo, answer: int | None = None
    ) -> CompletionLogprobs | None:
        """Return what is told of a prompt's tokens before the choice `index`."""
        if not echo.told or self._echoed is None:
            return None
        first_id = self._echoed.first_id(index if answer is None else answer)
        return self._logprob_body(index, echo.told, first_id)

    def _logprob_body(
        self, index: int, logprobs: Sequence[TokenLogprob | None], first_id: int = 0
    ) -> CompletionLogprobs | None:
        """Return tokens as a column each; one without a log probability is `first_id`."""
        most = self._request.logprobs
        if most is None:
            return None

        def text(token_id: int) -> str:
            return self._tokenizer.piece(token_id).decode(errors="replace")

        tokens = [text(first_id if drawn is None else drawn.token_id) for drawn in logprobs]
        offsets = []
        position = self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(position)
            position += len(token)
        self._offsets[index] = position
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[None if drawn is None else drawn.logprob for drawn in logprobs],
            top_logprobs=(
                [
                    None if drawn is None else {text(id_): value for id_, value in drawn.top[:most]}
                    for drawn in logprobs
                ]
                if most
                else None
            ),
            text_offset=offsets,
        )


def _likelihood(answer: Answer) -> float:
    """Return by what answers to one prompt are ranked: the mean of their log probabilities."""
    drawn = answer.logprobs
    return sum(one.logprob for one in drawn) / len(drawn) if drawn else -math.inf


def _joined(bodies: Sequence[CompletionLogprobs]) -> CompletionLogprobs | None:
    """Return the columns of all bodies, one below the other."""
    if not bodies:
        return None
    whole, *rest = bodies
    for body in rest:
        whole.tokens += body.tokens
        whole.token_logprobs += body.token_logprobs
        whole.text_offset += body.text_offset
        if whole.top_logprobs is not None:
            whole.top_logprobs += body.top_logprobs or ()
    return whole
