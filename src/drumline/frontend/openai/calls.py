"""What the two generating routes have in common: a checked request and its answer's frame."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from drumline.core.errors import RequestError
from drumline.frontend.answer import Asked, Piece
from drumline.frontend.generation import Usage
from drumline.frontend.limits import MAX_SEQUENCES, Limits
from drumline.frontend.logprobs import TokenLogprob
from drumline.frontend.openai.bounds import MOST_TOKENS, check
from drumline.frontend.openai.sampling import (
    choice_count,
    sampling_params,
    seed_of,
    stop_strings,
)
from drumline.frontend.openai.schema import (
    Metadata,
    PromptDetails,
    PromptLogprob,
    PromptLogprobs,
    SamplingFields,
    UsageBody,
)
from drumline.frontend.service import Service
from drumline.frontend.text.prompt_encoder import TooManyTokensError
from drumline.frontend.text.tokenizer import Tokenizer


class Frame(Struct, frozen=True):
    """What every object of one reply says of it."""

    id: str
    created: int
    model: str


class Answer(Struct):
    """A whole answer, put together from its pieces."""

    text: str = ""
    logprobs: list[TokenLogprob] = []
    finish_reason: str = ""
    stop_reason: str | int | None = None
    token_ids: list[int] = []
    cached_tokens: int = 0
    prompt: tuple[TokenLogprob | None, ...] | None = None
    weight_version: str = ""

    def add(self, piece: Piece) -> None:
        """Grow by `piece`."""
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.token_ids += piece.token_ids
        self.cached_tokens = piece.cached_tokens
        self.prompt = piece.prompt or self.prompt
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
            self.stop_reason = piece.stop_reason
            self.weight_version = piece.weight_version


class Call(Protocol):
    """One decoded request of a dialect, and how its answer is written."""

    @property
    def fields(self) -> SamplingFields:
        """What the request says about sampling."""

    async def asked(self, service: Service) -> Asked:
        """Check the request and encode its prompts. Raises RequestError 400."""

    def opening(self, frame: Frame, answers: int, usage: Usage) -> list[bytes]:
        """Return the events a stream of so many answers begins with."""

    def events(self, frame: Frame, piece: Piece, usage: Usage | None) -> list[bytes]:
        """Return the events of `piece`, with the usage so far where it is wanted."""

    def usage_event(self, frame: Frame, usage: Usage) -> bytes:
        """Return the event that closes a stream with what it cost."""

    def whole(self, frame: Frame, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the body of a reply that is not streamed."""


async def encoded(
    service: Service, text: str, *, add_special: bool, param: str, shortens: bool = False
) -> list[int]:
    """Return the ids of a prompt's text; `shortens` where it will be cut to what fits.

    Raises RequestError 400 for one that is too long or holds half a surrogate pair.
    """
    context = None if shortens else service.limits.context
    try:
        return await service.encoder.encode(text, add_special=add_special, most=context)
    except TooManyTokensError as error:
        raise service.limits.prompt_too_long(error.tokens, param, at_least=True) from None
    except TypeError:  # what the library says to text that has no UTF-8
        raise not_unicode(param) from None


async def ids_of(
    service: Service,
    prompts: Sequence[str | list[int]],
    *,
    add_special: bool,
    param: str,
    shortens: bool,
) -> list[list[int]]:
    """Return the ids of prompts that are texts, or ids already. Raises RequestError 400."""
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = await encoded(
                service, prompt, add_special=add_special, param=param, shortens=shortens
            )
        else:
            ids = prompt
            service.limits.check_ids(ids, param)
        found.append(ids)
    return found


def not_unicode(param: str) -> RequestError:
    """Return the refusal of a text with half a surrogate pair, which JSON can spell."""
    return RequestError(
        400, f"{param}: the text is no Unicode, it holds half a surrogate pair", param=param,
        code="invalid_text",
    )  # fmt: skip


def shortened(
    prompts: Sequence[list[int]], most: int | None, limits: Limits
) -> Sequence[list[int]]:
    """Return the last `most` tokens of each prompt, -1 being as many as leave room for one more.

    Raises RequestError 400 out of range.
    """
    if most is None:
        return prompts
    if most == -1:
        most = limits.room - 1
    check("truncate_prompt_tokens", most, 1, MOST_TOKENS)
    return [prompt[-most:] for prompt in prompts]


def asked_of(
    service: Service,
    fields: SamplingFields,
    prompts: Sequence[list[int]],
    *,
    param: str,
    max_param: str,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    choices: int | None = None,
) -> Asked:
    """Return what a request asks for, its parameters and its prompts checked.

    `choices` is how many answers to generate for each prompt, `n` by default.
    Raises RequestError 400 naming the parameter at fault; `param` is the prompts' own.
    """
    limits = service.limits
    choices = choice_count(fields) if choices is None else choices
    prompts = shortened(prompts, fields.truncate_prompt_tokens, limits)
    if len(prompts) * choices > MAX_SEQUENCES:
        raise RequestError(
            400,
            f"{len(prompts)} prompts with n {choices} are {len(prompts) * choices} answers; "
            f"{MAX_SEQUENCES} are allowed",
            param=param,
            code="too_many_answers",
        )
    sampling = sampling_params(fields, limits, service.tokenizer)
    lengths = []
    for prompt in prompts:
        if not prompt:
            raise RequestError(
                400, f"{param}: a prompt without tokens has no answer", param=param,
                code="empty_prompt",
            )  # fmt: skip
        lengths.append(
            limits.answer_tokens(len(prompt), max_tokens, param=param, max_param=max_param)
        )
    if sampling.min_new_tokens > min(lengths, default=0):
        raise RequestError(
            400,
            f"min_tokens is {sampling.min_new_tokens}; an answer may have {min(lengths)} tokens",
            param="min_tokens",
            code="integer_above_max_value",
        )
    return Asked(
        prompts=tuple(prompts),
        answer_tokens=max_tokens,
        choices=choices,
        sampling=sampling,
        seed=seed_of(fields, service.seed),
        stops=stop_strings(fields),
        keeps_stop=bool(fields.include_stop_str_in_output),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        data_parallel_rank=fields.data_parallel_rank,
    )


def usage_body(usage: Usage) -> UsageBody:
    """Return `usage` as the API words it."""
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_tokens),
    )


def usage_field(fields: SamplingFields, usage: Usage | None) -> UsageBody | UnsetType | None:
    """Return what stands in a chunk's `usage`: a body, null where one comes later, or nothing."""
    options = fields.stream_options
    if options is None or not options.include_usage:
        return UNSET
    return usage_body(usage) if usage is not None and options.continuous_usage_stats else None


def metadata_of(*answers: Answer | Piece) -> Metadata | UnsetType:
    """Return what is told of the weights behind answers, or behind the last pieces of some."""
    versions = dict.fromkeys(each.weight_version for each in answers if each.weight_version)
    return Metadata(", ".join(versions)) if versions else UNSET


def usage_grows(fields: SamplingFields) -> bool:
    """Whether every chunk tells what was used so far."""
    options = fields.stream_options
    return bool(options and options.include_usage and options.continuous_usage_stats)


def prompt_logprobs(
    told: Sequence[TokenLogprob | None] | None, tokenizer: Tokenizer
) -> PromptLogprobs | UnsetType:
    """Return what a prompt's tokens were told, as vLLM words it; nothing where nothing was."""
    if told is None:
        return UNSET

    def worded(id_: int, value: float, rank: int | None) -> PromptLogprob:
        return PromptLogprob(value, rank, tokenizer.piece(id_).decode(errors="replace"))

    places: PromptLogprobs = []
    for one in told:
        if one is None:
            places.append(None)
            continue
        place = {
            str(id_): worded(id_, value, rank + 1) for rank, (id_, value) in enumerate(one.top)
        }
        place.setdefault(str(one.token_id), worded(one.token_id, one.logprob, None))
        places.append(place)
    return places
