"""POST /generate: texts or token ids in, text, ids and their log probabilities out.

The shape is SGLang's: sampling parameters in an object of their own, one answer as an
object and several as a list, and in a stream everything so far in each event.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from drumline.core.errors import RequestError
from drumline.frontend.answer import Asked, Piece
from drumline.frontend.generation import Usage
from drumline.frontend.limits import MAX_LOGPROB_IDS, MAX_SEQUENCES
from drumline.frontend.logprobs import TokenLogprob
from drumline.frontend.openai.bounds import check
from drumline.frontend.openai.calls import Answer, Frame, asked_of, encoded
from drumline.frontend.openai.parameters import ParameterCheck
from drumline.frontend.openai.sampling import answer_length, logprob_count
from drumline.frontend.openai.schema import SamplingFields
from drumline.frontend.service import Service
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.frontend.web.incoming import decode_json

DEFAULT_MAX_TOKENS = 128
"""How long an answer is that names no length; SGLang's own default."""


Told = tuple[float | None, int | None, str | None]
"""A token's log probability, its id, and its text where that was asked for."""


class GenerateSampling(Struct, kw_only=True):
    """The sampling parameters of a request."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    sampling_seed: int | None = None


class GenerateRequest(Struct, kw_only=True):
    """POST /generate. Lists of prompts are answered by a list."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: Raw | UnsetType = UNSET
    rid: str | list[str] | None = None
    model: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: list[int | list[int]] | None = None
    """Tokens to be told of at every place, however likely: of each prompt, or a list for each."""
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: int | None = None
    data_parallel_rank: int | None = None


class FinishReason(Struct, omit_defaults=True):
    """Why an answer ended; `matched` is the stop string or token, where one did."""

    type: str
    length: int | None = None
    matched: str | int | None = None
    message: str | None = None


class Meta(Struct):
    """What an answer cost, and what was asked about its tokens."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str | UnsetType = UNSET
    input_token_logprobs: list[Told] | UnsetType = UNSET
    output_token_logprobs: list[Told] | UnsetType = UNSET
    input_top_logprobs: list[Any] | UnsetType = UNSET
    output_top_logprobs: list[Any] | UnsetType = UNSET
    input_token_ids_logprobs: list[Any] | UnsetType = UNSET
    output_token_ids_logprobs: list[Any] | UnsetType = UNSET


class GenerateBody(Struct):
    """One answer; `index` says of which prompt where there are several in a stream."""

    text: str
    output_ids: list[int]
    meta_info: Meta
    index: int | UnsetType = UNSET


_decoder = msgspec.json.Decoder(GenerateRequest)
_sampling_decoder = msgspec.json.Decoder(GenerateSampling)
_list_decoder = msgspec.json.Decoder(list[Raw])
_encode = msgspec.json.Encoder().encode
_parameters = ParameterCheck(GenerateSampling)


class GenerateCall:
    """One decoded request of this route."""

    def __init__(self, body: bytes, tokenizer: Tokenizer) -> None:
        """Decode `body`. Raises RequestError 400 naming the field that does not fit."""
        self._request = request = decode_json(body, _decoder)
        self._tokenizer = tokenizer
        told = request.sampling_params
        sampling = b"{}" if told is UNSET or bytes(told) == b"null" else bytes(told)
        self._listed = sampling.startswith(b"[")
        """Whether each prompt has sampling parameters of its own."""
        objects = list(map(bytes, _raws(sampling))) if self._listed else [sampling]
        if not objects:
            raise RequestError(
                400, "sampling_params is an empty list", param="sampling_params", code="empty_array"
            )
        self._each = [decode_json(each, _sampling_decoder) for each in objects]
        for each in objects:
            _parameters.check(each)
        self._fields = _fields(request, self._each[0])
        self._prompt_tokens: list[int] = []
        """How many each answer's prompt has."""
        self._answers: list[Answer] = []

    @property
    def fields(self) -> SamplingFields:
        return self._fields

    async def asked(self, service: Service) -> Asked:
        request = self._request
        top = logprob_count("top_logprobs_num", request.top_logprobs_num or 0)
        prompts = await self._encoded(service)
        named = self._named(service, len(prompts))
        if not self._listed and len(set(named)) == 1:
            asked = self._checked(service, self._each[0], prompts, top, named[0])
        else:
            samplings = self._each if self._listed else self._each * len(prompts)
            _check_entries("sampling_params", len(samplings), len(prompts))
            each = tuple(
                self._checked(service, sampling, [prompt], top, ids)
                for sampling, prompt, ids in zip(samplings, prompts, named, strict=True)
            )
            if len({one.choices for one in each}) > 1:
                raise RequestError(
                    400, "n differs among sampling_params; prompts of one request have as many "
                    "answers each", param="sampling_params", code="invalid_combination",
                )  # fmt: skip
            asked = replace(each[0], prompts=tuple(prompts), each=each)
            check("n", asked.choices, 1, MAX_SEQUENCES // len(prompts))
        self._prompt_tokens = [len(prompt) for prompt in prompts for _ in range(asked.choices)]
        self._answers = [Answer() for _ in self._prompt_tokens]
        return asked

    def _named(self, service: Service, prompts: int) -> list[tuple[int, ...]]:
        """Return the tokens to be told of at each place of each prompt. Raises RequestError 400."""
        lists, flat = _parted("token_ids_logprob", self._request.token_ids_logprob)
        if lists:
            _check_entries("token_ids_logprob", len(lists), prompts)
        for ids in (flat, *lists):
            service.limits.check_ids(ids, "token_ids_logprob")
            if len(ids) > MAX_LOGPROB_IDS:
                raise RequestError(
                    400, f"token_ids_logprob has {len(ids)} ids; {MAX_LOGPROB_IDS} are allowed",
                    param="token_ids_logprob", code="array_above_max_length",
                )  # fmt: skip
        return list(map(tuple, lists)) if lists else [tuple(flat)] * prompts

    def _checked(
        self,
        service: Service,
        sampling: GenerateSampling,
        prompts: list[list[int]],
        top: int,
        named: tuple[int, ...],
    ) -> Asked:
        """Return what is asked of some prompts. Raises RequestError 400."""
        request = self._request
        max_tokens = answer_length("max_new_tokens", sampling.max_new_tokens)
        if max_tokens is None:
            longest = max(map(len, prompts), default=0)
            max_tokens = max(1, min(DEFAULT_MAX_TOKENS, service.limits.room - longest))
        asked = asked_of(
            service,
            _fields(request, sampling),
            prompts,
            param="text" if request.text is not None else "input_ids",
            max_param="max_new_tokens",
            max_tokens=max_tokens,
            logprobs=top if request.return_logprob else None,
        )
        if not request.return_logprob:
            return asked
        told = top if self._start >= 0 else None
        return replace(asked, prompt_logprobs=told, logprob_ids=named)

    def opening(self, frame: Frame, answers: int, usage: Usage) -> list[bytes]:
        return []

    def events(self, frame: Frame, piece: Piece, usage: Usage | None) -> list[bytes]:
        answer = self._answers[piece.index]
        answer.add(piece)
        body = self._body(frame, answer, self._prompt_tokens[piece.index])
        if len(self._answers) > 1:
            body.index = piece.index
        return [_encode(body)]

    def usage_event(self, frame: Frame, usage: Usage) -> bytes:
        return _encode(usage)

    def whole(self, frame: Frame, answers: Sequence[Answer], usage: Usage) -> bytes:
        bodies = [
            self._body(frame, answer, tokens)
            for answer, tokens in zip(answers, self._prompt_tokens, strict=True)
        ]
        return _encode(bodies if self._several or len(bodies) > 1 else bodies[0])

    @property
    def _start(self) -> int:
        start = self._request.logprob_start_len
        return -1 if start is None else start

    @property
    def _several(self) -> bool:
        """Whether prompts came as a list, and so do answers."""
        request = self._request
        if request.text is not None:
            return isinstance(request.text, list)
        return bool(request.input_ids) and isinstance((request.input_ids or [0])[0], list)

    async def _encoded(self, service: Service) -> list[list[int]]:
        """Return the prompts' ids. Raises RequestError 400 unless there is one kind of prompt."""
        text, ids = self._request.text, self._request.input_ids
        if (text is None) == (ids is None):
            raise RequestError(
                400, "send either text or input_ids", param="text", code="invalid_combination"
            )
        if text is not None:
            texts = [text] if isinstance(text, str) else text
            _check_count("text", texts)
            return [await encoded(service, each, add_special=True, param="text") for each in texts]
        lists, flat = _parted("input_ids", ids)
        prompts = lists or [flat]
        _check_count("input_ids", prompts)
        for prompt in prompts:
            service.limits.check_ids(prompt, "input_ids")
        return prompts

    def _body(self, frame: Frame, answer: Answer, prompt_tokens: int) -> GenerateBody:
        meta = Meta(
            id=frame.id,
            finish_reason=_reason(answer) if answer.finish_reason else None,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(answer.token_ids),
            cached_tokens=answer.cached_tokens,
            weight_version=answer.weight_version or UNSET,
        )
        if self._request.return_logprob:
            drawn: Sequence[TokenLogprob | None] = answer.logprobs
            meta.output_token_logprobs = self._told(drawn)
            prompt = (answer.prompt or ())[self._start :] if self._start >= 0 else ()
            # The first token of a prompt follows nothing, and has an id all the same.
            meta.input_token_logprobs = self._told(prompt)
            if self._request.top_logprobs_num:
                meta.output_top_logprobs = [one and self._others(one.top) for one in drawn]
                meta.input_top_logprobs = [one and self._others(one.top) for one in prompt]
            if self._request.token_ids_logprob:
                meta.output_token_ids_logprobs = [one and self._others(one.named) for one in drawn]
                meta.input_token_ids_logprobs = [one and self._others(one.named) for one in prompt]
        return GenerateBody(answer.text, list(answer.token_ids), meta)

    def _told(self, tokens: Sequence[TokenLogprob | None]) -> list[Told]:
        return [
            (None, None, None)
            if one is None
            else (one.logprob, one.token_id, self._text(one.token_id))
            for one in tokens
        ]

    def _others(self, told: Sequence[tuple[int, float]]) -> list[Told]:
        return [(value, id_, self._text(id_)) for id_, value in told]

    def _text(self, token_id: int) -> str | None:
        if not self._request.return_text_in_logprobs:
            return None
        return self._tokenizer.piece(token_id).decode(errors="replace")


def _raws(data: bytes) -> list[Raw]:
    """Return the entries of a JSON list, undecoded."""
    return decode_json(data, _list_decoder)


def _fields(request: GenerateRequest, sampling: GenerateSampling) -> SamplingFields:
    """Return what a request says, in the words of the other routes."""
    seed = sampling.sampling_seed if sampling.seed is None else sampling.seed
    return SamplingFields(
        model=request.model,
        rid=request.rid,
        stream=request.stream,
        priority=request.priority,
        data_parallel_rank=request.data_parallel_rank,
        min_tokens=sampling.min_new_tokens,
        include_stop_str_in_output=sampling.no_stop_trim,
        seed=seed,
        **{name: getattr(sampling, name) for name in _SAME},
    )


_SAME = sorted(
    set(GenerateSampling.__struct_fields__) & set(SamplingFields.__struct_fields__) - {"seed"}
)
"""Parameters of one name and meaning."""


def _parted(name: str, ids: Sequence[int | list[int]] | None) -> tuple[list[list[int]], list[int]]:
    """Return the lists among ids, or else the ids. Raises RequestError 400 where both are there."""
    lists = [each for each in ids or () if isinstance(each, list)]
    flat = [each for each in ids or () if isinstance(each, int)]
    if lists and flat:
        raise RequestError(
            400, f"{name} mixes ids and lists of them", param=name, code="invalid_type"
        )
    return lists, flat


def _check_entries(name: str, entries: int, prompts: int) -> None:
    if entries != prompts:
        raise RequestError(
            400, f"{name} has {entries} entries for {prompts} prompts", param=name,
            code="invalid_value",
        )  # fmt: skip


def _check_count(name: str, prompts: Sequence[object]) -> None:
    if not 1 <= len(prompts) <= MAX_SEQUENCES:
        raise RequestError(
            400, f"{name} has {len(prompts)} entries; from 1 to {MAX_SEQUENCES} are allowed",
            param=name, code="array_above_max_length",
        )  # fmt: skip


def _reason(answer: Answer) -> FinishReason:
    match answer.finish_reason:
        case "length":
            return FinishReason("length", length=len(answer.token_ids))
        case "abort":
            return FinishReason("abort", message=str(answer.stop_reason or ""))
        case reason:
            return FinishReason(reason, matched=answer.stop_reason)
