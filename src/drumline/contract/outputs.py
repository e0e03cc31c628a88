"""What a rank tells its frontend: columns of outputs, and its load."""

from typing import Any

from msgspec import Struct


class Load(Struct, frozen=True):
    """A rank's load, as routers read it. Pages are parents of the pool."""

    num_running: int
    num_waiting: int
    kv_active_pages: int
    kv_total_pages: int


class PromptColumns(Struct, frozen=True):
    """What one request is told of its prompt's tokens, in whose order the lists are.

    The first entry of `logprobs` is None. Without other tokens asked for, `top_*` are None.
    """

    ids: list[int]
    logprobs: list[float | None]
    top_logprobs: list[list[float] | None] | None = None
    top_ids: list[list[int] | None] | None = None


class OutputColumns(Struct, kw_only=True):
    """One round's outputs, a column a field and an entry a request.

    `output_ids` are the ids since the request's last output. A finished reason is
    empty while the request runs, else `stop`, `length` or `abort`; `details` says
    more of it (`message`, `status_code`, `matched`), or is None.
    """

    rids: list[str] = []
    output_ids: list[list[int]] = []
    finished_reasons: list[str] = []
    prompt_tokens: list[int] = []
    completion_tokens: list[int] = []
    cached_tokens: list[int] = []
    logprobs: list[list[float]] = []
    logprob_ids: list[list[int]] = []
    top_logprobs: list[list[list[float]]] = []
    top_logprob_ids: list[list[list[int]]] = []
    details: list[dict[str, Any] | None] = []
    prompts: dict[int, PromptColumns] = {}
    """By entry, for the few that are told of their prompts, once each."""

    def __bool__(self) -> bool:
        return bool(self.rids)
