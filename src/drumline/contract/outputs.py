"""What a rank tells its frontend: columns of outputs, and its load."""

from typing import Any

from msgspec import Struct


class Load(Struct, frozen=True):
    """A rank's load, as routers read it. Pages are parents of the pool."""

    num_running: int
    num_waiting: int
    kv_active_pages: int
    kv_total_pages: int


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

    def __bool__(self) -> bool:
        return bool(self.rids)
