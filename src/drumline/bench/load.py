"""The requests of a benchmark: what is asked, and when; drawn, so that a seed gives them again."""

import random
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from drumline.core.config.bench import Endpoint, LoadConfig

_SPECIAL = 1000
"""Below this, and in the first half of a small vocabulary, may lie ids that are no text."""
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word"
)
"""Each of them a token in most vocabularies."""


class Asked(Struct, frozen=True):
    """One request."""

    due_s: float
    """When it is sent, behind the first moment of all."""
    prompt: list[int] | str
    """Token ids, or words."""
    input_tokens: int
    """How many the prompt has, of words about as many."""
    output_tokens: int
    """How many the answer may have."""


def drawn(load: LoadConfig, endpoint: Endpoint) -> list[Asked]:
    """Return the requests of a load in the order in which they are due."""
    lots = random.Random(load.seed)
    # Of their own, so that the same is asked at any rate.
    moments = random.Random(f"moments {load.seed}")
    requests = []
    due_s = 0.0
    for _ in range(load.num_prompts):
        # The interval is 0 where the rate is infinite.
        due_s += moments.expovariate(1.0) / load.request_rate
        input_tokens = _length(lots, load.random_input_len, load.random_range_ratio)
        output_tokens = _length(lots, load.random_output_len, load.random_range_ratio)
        prompt = _prompt(lots, endpoint, input_tokens, load.vocab_size)
        requests.append(Asked(due_s, prompt, input_tokens, output_tokens))
    return requests


def body_of(asked: Asked, model: str, *, ignore_eos: bool) -> Mapping[str, Any]:
    """Return what is posted for a request."""
    said: dict[str, Any] = {
        "model": model,
        "max_tokens": asked.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        said["ignore_eos"] = True
    if isinstance(asked.prompt, str):
        said["messages"] = [{"role": "user", "content": asked.prompt}]
    else:
        said["prompt"] = asked.prompt
    return said


def _length(lots: random.Random, tokens: int, ratio: float) -> int:
    return max(1, round(tokens * lots.uniform(1 - ratio, 1 + ratio)))


def _prompt(
    lots: random.Random, endpoint: Endpoint, tokens: int, vocabulary: int
) -> list[int] | str:
    if endpoint is Endpoint.CHAT:
        return " ".join(lots.choices(_WORDS.split(), k=tokens))
    return lots.choices(range(min(_SPECIAL, vocabulary // 2), vocabulary), k=tokens)
