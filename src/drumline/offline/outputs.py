"""What a Python program gets back, in the shape that vLLM's users know."""

from msgspec import Struct


class CompletionOutput(Struct, kw_only=True):
    """One answer, as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    """`stop`, `length` or `abort`; None while it runs."""
    stop_reason: str | int | None = None
    """The stop string or token id that ended it, or why the engine gave it up."""


class RequestOutput(Struct, kw_only=True):
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
