"""How a Python program asks for an answer: the names and defaults that vLLM's users know."""

from msgspec import Struct

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
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


def fields_of(params: SamplingParams) -> SamplingFields:
    """Return `params` as the HTTP API's fields, which are checked in one place for both."""
    bias = {str(id_): value for id_, value in (params.logit_bias or {}).items()}
    return SamplingFields(
        n=params.n,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=None if params.top_k == -1 else params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=bias or None,
        skip_special_tokens=params.skip_special_tokens,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
