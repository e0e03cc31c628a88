"""Sampling parameters as they travel, and how they are brought into their final form."""

import zlib
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from drumline.contract.request import TOP_K_OFF

_GREEDY_BELOW = 1e-6


class SamplingParams(Struct, array_like=True, kw_only=True):
    """How a request samples and stops; slots 0 … 28.

    `is_normalized` says that a sender already did what `normalized` does.
    """

    max_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: set[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    thinking_budget: int | None = None
    custom_params: dict[str, Any] | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    stop_strs: str | list[str] | None = None
    stop_str_max_len: int = 0
    is_normalized: bool = False


def normalized(params: SamplingParams, stop_length: Callable[[str], int] = len) -> SamplingParams:
    """Return `params` in their final form; unchanged if they are in it already.

    Temperature zero becomes greedy (`top_k` 1 at temperature 1, seed 0), `top_k` -1
    becomes TOP_K_OFF, and `stop` becomes a list with the length of its longest entry
    as `stop_length` measures it: in tokens where a tokenizer is at hand, else in characters.
    """
    if params.is_normalized:
        return params
    greedy = params.temperature < _GREEDY_BELOW
    top_k = 1 if greedy else params.top_k
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    return replace(
        params,
        temperature=1.0 if greedy else params.temperature,
        top_k=TOP_K_OFF if top_k == -1 else top_k,
        seed=0 if top_k == 1 else params.seed,
        stop_token_ids=params.stop_token_ids or None,
        stop_strs=stops,
        stop_str_max_len=max(map(stop_length, stops), default=0),
        is_normalized=True,
    )


def seed_of(rid: str) -> int:
    """Return the seed of a request that names none: the CRC-32 of its id."""
    return zlib.crc32(rid.encode())
