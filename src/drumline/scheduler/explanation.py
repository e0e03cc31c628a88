"""Why a request is where it is, in words, and how its prefix matched.

It only looks: asking changes no plan.
"""

from drumline.scheduler.admission import Admission, Verdict
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.lifecycle import State
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.rows import Rows
from drumline.scheduler.storage.tier import StorageTier

_PEERS = {
    State.BOOTSTRAPPING: "waits until its peers have found each other",
    State.HANDING_OVER: "its peer is taking its prompt's cache over",
    State.RECEIVING: "its peer is sending its prompt's cache",
    State.RETIRING: "is over, and holds its blocks until no peer touches them",
}


def explain(
    rid: str,
    requests: RequestTable,
    rows: Rows,
    pool: BlockPool,
    admission: Admission,
    storage: StorageTier | None,
) -> str:
    """Say where the request stands, what it waits for and what of its prompt is cached."""
    request = requests.get(rid)
    if request is None:
        return f"{rid}: unknown"
    if request.state is State.SUBMITTED:
        wait = _wait(request, requests, rows, pool, admission)
        return f"{rid}: waits, {wait}; {_cached(request, admission)}"
    if request.state is State.PREFETCHING and storage is not None:
        return f"{rid}: waits {storage.explain(rid)}; {_cached(request, admission)}"
    peers = _PEERS.get(request.state)
    if peers is not None:
        return f"{rid}: {peers}; prompt {request.planned} of {request.prompt_tokens} tokens planned"
    text = (
        f"{rid}: {request.state.name.lower()}, prompt {request.planned} of "
        f"{request.prompt_tokens} tokens planned, {request.cached_tokens} of them were cached"
    )
    if request.host_tokens:
        text += f", {request.host_tokens} in host memory"
    if request.row:
        row = request.row
        text += (
            f"; row {row}, {int(rows.known[row])} tokens known, "
            f"{int(rows.columns[0][row])} blocks, {int(rows.outstanding[row])} results outstanding"
        )
    elif request.state is State.RETRACTED:
        text += f"; suspended until its blocks fit again, {pool.empty} pages are empty"
    return text


def _wait(
    request: Request, requests: RequestTable, rows: Rows, pool: BlockPool, admission: Admission
) -> str:
    suspended = requests.counts[State.RETRACTED]
    if suspended:
        return f"{suspended} suspended requests come back first"
    if not rows.free:
        return f"all {len(rows.owners) - 1} rows are taken, {_place(request, admission)}"
    verdict = admission.verdicts.get(request.rid)
    if verdict is Verdict.NO_ROOM:
        text = (
            f"its first chunk of a {request.prompt_tokens}-token prompt found no room: "
            f"{pool.empty} pages are empty, {pool.evictable} blocks could be given up"
        )
        if request.passed:
            text += f"; {request.passed} plans admitted later ones"
        if admission.line.aged(request):
            text += ", and none may pass it any more"
        return text
    if verdict is Verdict.PREFIX_PENDING:
        return "another request is computing its prefix"
    if verdict is Verdict.FETCH_PENDING:
        return "storage is fetching its prefix for another request"
    if admission.unfinished is not None:
        return f"the prompt of {admission.unfinished.rid} is not finished"
    return f"for its turn, {_place(request, admission)}"


def _place(request: Request, admission: Admission) -> str:
    return f"{admission.line.ahead_of(request)} requests are before it"


def _cached(request: Request, admission: Admission) -> str:
    match = admission.match(request)
    if match is None:
        return "prefixes are not cached"
    text = f"{match.tokens} of its {request.prompt_tokens} prompt tokens are cached"
    if match.reach > match.tokens:
        text += f", {match.reach} but for windows or state groups"
    return text
