"""A round's outputs, laid out as the columns that the frontend is sent.

It adds entries and decides nothing; every column gets one for each request that is told
something.
"""

from drumline.contract.arrays import IntArray
from drumline.contract.outputs import OutputColumns, PromptColumns
from drumline.control.requests import Ending, Refusal, Request

# Shared by all entries that have none; nobody writes to a column that was handed out.
_NO_FLOATS: list[float] = []
_NO_IDS: list[int] = []
_NO_TOP: list[list[float]] = []
_NO_TOP_IDS: list[list[int]] = []


def add_tokens(
    columns: OutputColumns,
    rids: list[str],
    prompt_tokens: list[int],
    cached_tokens: list[int],
    tokens: IntArray,
    produced: IntArray,
) -> None:
    """Tell the clients of `rids` one token each, `[len(rids)]`, and how many they have now."""
    count = len(rids)
    columns.rids += rids
    columns.output_ids += [[token] for token in tokens.tolist()]
    columns.finished_reasons += [""] * count
    columns.prompt_tokens += prompt_tokens
    columns.completion_tokens += produced.tolist()
    columns.cached_tokens += cached_tokens
    columns.logprobs += [_NO_FLOATS] * count
    columns.logprob_ids += [_NO_IDS] * count
    columns.top_logprobs += [_NO_TOP] * count
    columns.top_logprob_ids += [_NO_TOP_IDS] * count
    columns.details += [None] * count


def add_request(
    columns: OutputColumns, request: Request, produced: int, ending: Ending | None
) -> None:
    """Tell a client what is held of its request, with its end if it is over; nothing is held
    afterwards."""
    _add(columns, request.rid, request.prompt_tokens, produced, request.cached_tokens, ending)
    columns.output_ids[-1] = request.held
    if request.held_logprobs:
        columns.logprobs[-1] = request.held_logprobs
        columns.logprob_ids[-1] = request.held
        columns.top_logprobs[-1] = request.held_top_logprobs
        columns.top_logprob_ids[-1] = request.held_top_ids
        request.held_logprobs, request.held_top_logprobs, request.held_top_ids = [], [], []
    request.held = []
    told = request.prompt_logprobs
    # Whoever has a token has computed its whole prompt.
    if told is not None and produced:
        top = (told.top_values, told.top_ids) if told.wants_top else ()
        columns.prompts[len(columns.rids) - 1] = PromptColumns(told.ids, told.values, *top)
        request.prompt_logprobs = None
    if ending is not None and request.pooled is not None and produced:
        told_besides = ending.details() or {"type": ending.reason.value}
        columns.details[-1] = {**told_besides, "embedding": request.pooled.vector()}


def add_refusal(columns: OutputColumns, refusal: Refusal) -> None:
    """Tell a client that its request is not served."""
    _add(columns, refusal.rid, refusal.prompt_tokens, 0, 0, refusal.ending)


def _add(
    columns: OutputColumns,
    rid: str,
    prompt: int,
    produced: int,
    cached: int,
    ending: Ending | None,
) -> None:
    columns.rids.append(rid)
    columns.output_ids.append(_NO_IDS)
    columns.finished_reasons.append(ending.reason.value if ending else "")
    columns.prompt_tokens.append(prompt)
    columns.completion_tokens.append(produced)
    columns.cached_tokens.append(cached)
    columns.logprobs.append(_NO_FLOATS)
    columns.logprob_ids.append(_NO_IDS)
    columns.top_logprobs.append(_NO_TOP)
    columns.top_logprob_ids.append(_NO_TOP_IDS)
    columns.details.append(ending.details() if ending else None)
