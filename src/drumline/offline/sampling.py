"""How a Python program asks for an answer: the names and defaults that vLLM's users know."""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from drumline.core.errors import RequestError
from drumline.frontend.openai.sampling import logprob_count
from drumline.frontend.openai.schema import SamplingFields


class SamplingParams(Struct, kw_only=True):
    """How an answer is drawn, and when it ends.

    `max_tokens` None lets it grow to what the context holds. `temperature` 0 takes
    the likeliest token every time.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    """How many of the likeliest tokens to tell at each place of the answer."""
    prompt_logprobs: int | None = None
    """And at each place of the prompt."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


_ELSEWHERE = {"logprobs", "prompt_logprobs"}
"""Fields that the HTTP API's routes spell in ways of their own."""
_CHECKED = [name for name in SamplingParams.__struct_fields__ if name not in _ELSEWHERE]


def fields_of(params: SamplingParams) -> SamplingFields:
    """Return `params` as the HTTP API's fields, which are checked in one place for both.

    Raises RequestError 400 naming a field of the wrong type.
    """
    if not isinstance(params, SamplingParams):
        raise RequestError(
            400,
            f"sampling_params are SamplingParams, not {type(params).__name__}",
            param="sampling_params",
        )
    said = {name: getattr(params, name) for name in _CHECKED}
    bias = said["logit_bias"]
    if isinstance(bias, Mapping):
        said["logit_bias"] = {str(id_): value for id_, value in bias.items()}
    try:
        return msgspec.convert(said, SamplingFields)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        name = where.strip("`$.")
        raise RequestError(400, f"{name}: {what}", param=name) from None


def logprob_counts(params: SamplingParams) -> tuple[int | None, int | None]:
    """Return how many likely tokens are told in answer and prompt.

    Raises RequestError 400 for a number that is none or out of range.
    """
    counts = []
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None:
            if not isinstance(value, int):
                raise RequestError(400, f"{name} is {value!r}; it must be a number", param=name)
            logprob_count(name, value)
        counts.append(value)
    return counts[0], counts[1]
