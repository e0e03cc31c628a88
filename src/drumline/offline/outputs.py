"""What a Python program gets back, in the shape that vLLM's users know."""

from msgspec import Struct


class Logprob(Struct, frozen=True):
    """The log probability of one token at one place."""

    logprob: float
    rank: int | None
    """1 for the likeliest; None where the token is not among those that were asked for."""
    decoded_token: str


Logprobs = list[dict[int, Logprob]]


class CompletionOutput(Struct, kw_only=True):
    """One answer, as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: Logprobs | None = None
    """At each place, by id: the token that stands there, and the likeliest."""
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    """`stop`, `length` or `abort`; None while it runs."""
    stop_reason: str | int | None = None
    """The stop string or token id that ended it, or why the engine gave it up."""


class RequestOutput(Struct, kw_only=True):
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """As those of an answer; the first is None."""
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
