"""Why a request is where it is, in words."""

from drumline.scheduler.admission import Verdict
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.lifecycle import State
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.rows import Rows


def explain(
    rid: str, requests: RequestTable, rows: Rows, pool: BlockPool, verdicts: dict[str, Verdict]
) -> str:
    """Say where the request stands and what it waits for."""
    request = requests.get(rid)
    if request is None:
        return f"{rid}: unknown"
    if request.state is State.SUBMITTED:
        return f"{rid}: waits, {_wait(request, rows, pool, verdicts.get(rid))}"
    text = (
        f"{rid}: {request.state.name.lower()}, prompt {request.planned} of "
        f"{request.prompt_tokens} tokens planned, {request.cached_tokens} of them were cached"
    )
    if request.row:
        row = request.row
        text += (
            f"; row {row}, {int(rows.known[row])} tokens known, "
            f"{int(rows.columns[0][row])} blocks, {int(rows.outstanding[row])} results outstanding"
        )
    return text


def _wait(request: Request, rows: Rows, pool: BlockPool, verdict: Verdict | None) -> str:
    if not rows.free:
        return f"all {len(rows.owners) - 1} rows are taken"
    if verdict is Verdict.NO_ROOM:
        return (
            f"its first chunk of a {request.prompt_tokens}-token prompt found no room: "
            f"{pool.empty} pages are empty, {pool.evictable} blocks could be given up"
        )
    if verdict is Verdict.PREFIX_PENDING:
        return "another request is computing its prefix"
    return "for its turn"
