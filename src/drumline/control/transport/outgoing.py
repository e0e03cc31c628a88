"""Turning a round's outputs into what the wire carries."""

from typing import Any

from drumline.contract.outputs import Load, OutputColumns
from drumline.wire.output import BatchTokenIDOutSlim


def slim(outputs: OutputColumns, load: Load, engine_index: int) -> BatchTokenIDOutSlim:
    """Return a batch for the wire, which shares its columns with `outputs`.

    Every column has an entry a row, for readers drop a ragged batch whole; columns
    that `outputs` leaves empty are filled with empty entries.
    """
    rows = len(outputs.rids)
    nothing: list[Any] = [[]] * rows
    # The wire's lists may hold None where a round's never do, which list types cannot say.
    top_values: list[Any] = outputs.top_logprobs or nothing
    top_ids: list[Any] = outputs.top_logprob_ids or nothing
    prompts = _prompt_columns(outputs, rows) if outputs.prompts else [nothing] * 4
    return BatchTokenIDOutSlim(
        rids=outputs.rids,
        output_ids=outputs.output_ids,
        finished_reasons=outputs.finished_reasons,
        prompt_tokens=outputs.prompt_tokens,
        completion_tokens=outputs.completion_tokens,
        cached_tokens=outputs.cached_tokens,
        output_token_logprobs_val=outputs.logprobs or nothing,
        output_token_logprobs_idx=outputs.logprob_ids or nothing,
        engine_index=engine_index,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_active_pages=load.kv_active_pages,
        kv_total_pages=load.kv_total_pages,
        finish_reason_details=outputs.details or [None] * rows,
        spec_verify_ct=[0] * rows,
        accept_draft_tokens=[None] * rows,
        input_token_logprobs_val=prompts[0],
        input_token_logprobs_idx=prompts[1],
        input_top_logprobs_val=prompts[2],
        input_top_logprobs_idx=prompts[3],
        output_top_logprobs_val=top_values,
        output_top_logprobs_idx=top_ids,
    )


def _prompt_columns(outputs: OutputColumns, rows: int) -> list[list[Any]]:
    """Return the columns of log probabilities of prompts: values and ids, then of other tokens."""
    columns: list[list[Any]] = [[[] for _ in range(rows)] for _ in range(4)]
    for row, told in outputs.prompts.items():
        values, ids, top_values, top_ids = columns
        values[row], ids[row] = told.logprobs, told.ids
        top_values[row], top_ids[row] = told.top_logprobs or [], told.top_ids or []
    return columns
