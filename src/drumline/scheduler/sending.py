"""A prefill engine's prompts that are computed: handing them over to the decode engine.

A prompt is handed over once its last chunk's result is there, as its first token goes along.
Its row and blocks stay as they are until the peer has read them, or the transfer failed.
"""

from drumline.contract.plan import RemoteDecode
from drumline.core.errors import InvariantError
from drumline.scheduler.draft import Draft
from drumline.scheduler.events import Results
from drumline.scheduler.lifecycle import Move, State
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.rows import Rows
from drumline.scheduler.views import RowViews


class Sending:
    """The requests whose first token is known, until a plan hands them over."""

    __slots__ = ("_landed", "_requests", "_rows", "_views")

    def __init__(self, requests: RequestTable, rows: Rows, views: RowViews) -> None:
        self._requests = requests
        self._rows = rows
        self._views = views
        self._landed: dict[str, tuple[Request, int]] = {}

    def commit(self, results: Results) -> None:
        """Take the first tokens of prompts from results that the rows have already."""
        rows, at = self._rows, 0
        tokens = results.tokens.tolist()
        for row, generation, count in zip(
            results.rows.tolist(),
            results.generations.tolist(),
            results.counts.tolist(),
            strict=True,
        ):
            owner = rows.owners[row]
            if (
                count
                and owner is not None
                and rows.generation[row] == generation
                and owner.state is State.AWAITING_RESULT
            ):
                self._requests.move(owner, Move.RESULT_IN)
                self._landed[owner.rid] = owner, tokens[at]
            at += count

    def plan(self, draft: Draft) -> None:
        """Hand over what can be, in order of submission."""
        for request, token in sorted(self._landed.values(), key=_by_sequence):
            draft.remote_decode(
                RemoteDecode(
                    row=request.row,
                    generation=int(self._rows.generation[request.row]),
                    rid=request.rid,
                    prompt_tokens=request.prompt_tokens,
                    token=token,
                    tables=self._views.tables(request.row),
                )
            )
        self._landed.clear()

    def leave(self, request: Request) -> None:
        """Forget a request that ended."""
        self._landed.pop(request.rid, None)

    def check(self) -> None:
        """Raise InvariantError unless whoever is to be handed over has a token and a row."""
        for request, _token in self._landed.values():
            if request.state is not State.HANDING_OVER or not request.row:
                raise InvariantError(f"{request!r} is to be handed over")


def _by_sequence(landed: tuple[Request, int]) -> int:
    return landed[0].sequence
