"""From a frontend's message to the scheduler: who is admitted, who waits, who is refused.

It owns the requests that a pause withholds. Those that wait for their grammars are the
grammars' own; whether the engine withholds at all is the controls'.
"""

import logging
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from drumline.contract.grammar import Attachment
from drumline.contract.messages import AbortAsked, CallAsked, Message, Submitted
from drumline.contract.ports import DataPlane
from drumline.contract.request import GenerateRequest
from drumline.control.controls import Controls
from drumline.control.grammars import Grammars
from drumline.control.history import HistoryRows
from drumline.control.ingress import Ingress
from drumline.control.output import Outputs
from drumline.control.requests import (
    CLIENT_ERROR,
    CONFLICT,
    NO_CAPACITY,
    TOO_MANY,
    Admitted,
    Ending,
    Reason,
    Refusal,
)
from drumline.control.standing import AbortAll, CancelUnscheduled, Effect, Restore
from drumline.scheduler.scheduler import Scheduler

_SPARE_WITHHELD = 16
"""Withheld requests that may be over already; fewer are not worth a search."""

_PAUSED = Ending(Reason.ABORT, "the engine was paused, which ended what ran", NO_CAPACITY)

_log = logging.getLogger(__name__)


class Arrivals:
    """What arrives at one rank, in order."""

    def __init__(
        self,
        ingress: Ingress,
        outputs: Outputs,
        controls: Controls,
        grammars: Grammars,
        history: HistoryRows | None,
        scheduler: Scheduler,
        data_plane: DataPlane,
    ) -> None:
        self._ingress = ingress
        self._outputs = outputs
        self._controls = controls
        self._grammars = grammars
        self._history = history
        self._scheduler = scheduler
        self._data_plane = data_plane
        self._withheld: list[Admitted] = []

    @property
    def withheld(self) -> int:
        """Requests that a pause holds back."""
        return len(self._owned(self._withheld))

    def take(self, messages: Iterable[Message], now_us: int) -> None:
        """Take a round's messages in order: a control operation after the requests before it."""
        arrived: set[str] = set()
        admitted: list[Admitted] = []
        for message in messages:
            match message:
                case Submitted(request):
                    if self._is_new(request, arrived):
                        answer = self._answer(request, now_us)
                        if isinstance(answer, Refusal):
                            self._outputs.refuse(answer)
                        elif self._outputs.register(answer.request, now_us):
                            admitted.append(answer)
                case AbortAsked(rids):
                    for rid in rids:
                        self._outputs.abort(rid, now_us)
                case CallAsked():
                    self._submit(admitted, now_us)
                    admitted = []
                    self.carry_out(self._controls.ask(message), now_us)
        self._submit(admitted, now_us)
        self._outputs.expire(now_us)

    def take_grammars(self, now_us: int) -> None:
        """Let requests go on whose grammars are ready on every rank; end those whose never are.

        Collective: over the replica, while requests wait for grammars.
        """
        if not self._grammars.waiting:
            return
        drained = self._grammars.drain(self._outputs.owns)
        for request, ending in drained.failed:
            self._outputs.fail((request.rid,), ending, now_us)
        if drained.ready:
            ready = [replace(each, grammar=grammar) for each, grammar in drained.ready]
            self._submit(ready, now_us)

    def carry_out(self, effects: Sequence[Effect], now_us: int) -> None:
        """Do what a control operation wants done at once; those who are ended are told why."""
        if not effects:
            return
        lost = self._controls.lost
        ending = _PAUSED if lost is None else Ending(Reason.ABORT, lost, NO_CAPACITY)
        for effect in effects:
            match effect:
                case CancelUnscheduled():
                    waited = [request.rid for request in self._grammars.cancel()]
                    self._outputs.fail(waited, ending, now_us)
                case AbortAll():
                    self._outputs.abort_all(ending, now_us)
                case Restore(regions=regions):
                    self._data_plane.restore_memory(regions)

    def _answer(self, request: GenerateRequest, now_us: int) -> Admitted | Refusal:
        refusing = self._controls.refusing
        if refusing is not None:
            return self._ingress.refusal(request, refusing, NO_CAPACITY)
        return self._ingress.admit(request, now_us)

    def _is_new(self, request: GenerateRequest, arrived: set[str]) -> bool:
        """Whether a request's id is free; sorted out before anything is refused or registered."""
        rid = request.rid
        if rid in arrived or self._outputs.holds(rid):
            # Whatever was said under this id would end the stream of the one that runs.
            _log.warning("request %r repeats the id of a live one and is dropped", rid)
            return False
        arrived.add(rid)
        if self._scheduler.knows(rid):
            fault = f"request id {rid!r} is still held by a request that just ended; use a new id"
            self._outputs.refuse(self._ingress.refusal(request, fault, CONFLICT))
            return False
        return True

    def _submit(self, admitted: list[Admitted], now_us: int) -> None:
        """Hand requests to the data plane, then to the scheduler, which may refuse them all.

        Those that still need their grammar wait for it first. While the engine is paused
        they are withheld, and go ahead of others afterwards.
        """
        admitted = self._grammars.hold(admitted)
        if self._controls.withholding:
            self._withheld += admitted
            if len(self._withheld) > 2 * self._outputs.running + _SPARE_WITHHELD:
                # A pause may last, and clients come and go meanwhile.
                self._withheld = self._owned(self._withheld)
            return
        if self._withheld:
            admitted = self._withheld + admitted
            self._withheld = []
        admitted = self._queued(self._owned(admitted), now_us)
        if not admitted:
            return
        self._data_plane.admit([each.admission for each in admitted])
        for each in admitted:
            each.request.known_to_device = True
            if self._history is not None:
                self._history.admit(each.request.rid, each.spec.tokens)
        attachments = [
            Attachment(each.request.rid, each.grammar)
            for each in admitted
            if each.grammar is not None
        ]
        if attachments:
            self._data_plane.attach_grammars(attachments)
        refused = self._scheduler.submit([each.spec for each in admitted])
        if refused is not None:
            ending = Ending(Reason.ABORT, refused, CLIENT_ERROR)
            self._outputs.fail([each.request.rid for each in admitted], ending, now_us)

    def _owned(self, admitted: list[Admitted]) -> list[Admitted]:
        """Return the requests that were not aborted since they arrived."""
        return [each for each in admitted if self._outputs.owns(each.request)]

    def _queued(self, admitted: list[Admitted], now_us: int) -> list[Admitted]:
        """Return the requests that the queue has room for; the others end here, with 429."""
        kept: list[Admitted] = []
        tokens = 0
        for each in admitted:
            prompt = each.request.prompt_tokens
            full = self._scheduler.crowded(len(kept) + 1, tokens + prompt)
            if full is None:
                kept.append(each)
                tokens += prompt
            else:
                ending = Ending(Reason.ABORT, full, TOO_MANY)
                self._outputs.fail((each.request.rid,), ending, now_us)
        return kept
