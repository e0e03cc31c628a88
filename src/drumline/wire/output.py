"""What an engine sends its frontend: batches of outputs, replies to calls, its last word."""

from typing import Any

from msgspec import Struct

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""The raw frame that an engine sends last."""

NUMERICAL_ERROR = 523
"""The `err_type` of a request that ended because the model's output was not finite."""

Floats = list[float]
Ints = list[int]


class BatchTokenIDOutSlim(Struct, array_like=True, kw_only=True, tag=True):
    """Outputs of one round: a column a field, an entry a request; slots 1 … 22.

    `output_ids` are the ids since the request's last output. A finished reason is
    empty while the request runs, else `stop`, `length` or `abort`. A batch of no
    rows carries the load alone. Columns from `finish_reason_details` on may be absent,
    then they are empty.
    """

    rids: list[str]
    output_ids: list[Ints]
    finished_reasons: list[str]
    prompt_tokens: Ints
    completion_tokens: Ints
    cached_tokens: Ints
    output_token_logprobs_val: list[Floats]
    output_token_logprobs_idx: list[Ints]
    engine_index: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_active_pages: int = 0
    kv_total_pages: int = 0
    finish_reason_details: list[dict[str, Any] | None] = []
    spec_verify_ct: Ints = []
    accept_draft_tokens: list[float | None] = []
    input_token_logprobs_val: list[list[float | None]] = []
    input_token_logprobs_idx: list[Ints] = []
    input_top_logprobs_val: list[list[Floats | None] | None] = []
    input_top_logprobs_idx: list[list[Ints | None] | None] = []
    output_top_logprobs_val: list[list[Floats | None]] = []
    output_top_logprobs_idx: list[list[Ints | None]] = []


FULL_COLUMNS = BatchTokenIDOutSlim.__struct_fields__[:6]
LOGPROB_COLUMNS = BatchTokenIDOutSlim.__struct_fields__[6:8]
OPTIONAL_COLUMNS = BatchTokenIDOutSlim.__struct_fields__[13:]


def ragged(batch: BatchTokenIDOutSlim) -> str | None:
    """Return the first column whose length is not the batch's, or None.

    Columns that nobody asked for may be empty.
    """
    rows = len(batch.rids)
    for name in FULL_COLUMNS:
        if len(getattr(batch, name)) != rows:
            return name
    for name in (*LOGPROB_COLUMNS, *OPTIONAL_COLUMNS):
        if len(getattr(batch, name)) not in {0, rows}:
            return name
    return None


class ControlReplySlim(Struct, array_like=True, kw_only=True, tag=True):
    """The answer to a control call, under the call's id; slots 1 … 4."""

    call_id: int
    success: bool
    message: str | None
    engine_index: int = 0


class LoadSnapshot(Struct, array_like=True, kw_only=True, tag=True):
    """A rank's load as one in-process publisher of the original engine sends it."""

    epoch: str
    sequence: int
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_active_pages: int
    num_used_pages: int
    max_total_pages: int
    valid_for_ms: int


Output = BatchTokenIDOutSlim | ControlReplySlim
