"""The sampler: each pool row's way of drawing, applied to a batch's logits."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drumline.contract.arrays import IntArray
from drumline.contract.grammar import Attachment
from drumline.contract.ports import LogprobPlan
from drumline.contract.request import Admission
from drumline.contract.result import RowLogprobs
from drumline.core.errors import InvariantError
from drumline.device.kernels.native import Machine
from drumline.device.sampling.constraints import Handful, advance, mask
from drumline.device.sampling.draw import Draw, RowSettings, TorchDraw
from drumline.device.sampling.edits import Asking, Edits
from drumline.device.sampling.logprobs import (
    PromptSpan,
    RowsLooked,
    SpanLooked,
    prompt_logprobs,
    row_logprobs,
)
from drumline.device.sampling.native_draw import NativeDraw
from drumline.device.sampling.processors import LogitsProcessor
from drumline.device.sampling.resident import Resident
from drumline.device.staging import Download, all_on_device, on_device

_CPU = torch.device("cpu")


class Sampled(Struct, frozen=True, eq=False):
    """One token a row, and what was looked up of its log probabilities.

    `bad` are the rows whose logits were not finite, `stuck` those whose request or grammar
    leaves no token, `[rows]` each. `faults` are the rows whose grammar could not go on,
    `failed` those whose logits processor raised. The token of such a row means nothing.
    """

    tokens: Tensor
    bad: Tensor
    stuck: Tensor
    looked: tuple[RowsLooked, ...] = ()
    faults: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()

    @property
    def logprobs(self) -> tuple[RowLogprobs, ...]:
        """The log probabilities asked for; waits for the device."""
        tensors = [tensor for each in self.looked for tensor in each.tensors]
        arrays = iter(Download(tensors, self.tokens.device).wait())
        return tuple(row for each in self.looked for row in each.told(arrays))


class Sampler:
    """Draws tokens for pool rows, as the requests bound to them ask."""

    __slots__ = (
        "_alone",
        "_constrained",
        "_device",
        "_draw",
        "_edited",
        "_edits",
        "_machine",
        "_residents",
        "_rows",
        "_settings",
    )

    def __init__(
        self,
        rows: int,
        vocab: int,
        processors: Mapping[str, LogitsProcessor] | None = None,
        *,
        device: torch.device = _CPU,
        alone: bool = False,
        machine: Machine | None = None,
    ) -> None:
        """Make a sampler, with kernels where there is a `machine` to run them.

        `alone` says that a row gets the same bits in any batch; without kernels it takes showing
        them one row at a time. `processors` are those that requests may name.
        """
        self._alone = alone and machine is None
        self._device = device
        self._machine = machine
        self._residents: dict[str, Resident] = {}
        self._rows: list[Resident | None] = [None] * rows
        self._edits = Edits(vocab, processors or {}, device, machine)
        self._edited = np.zeros(rows, np.bool_)
        self._constrained = np.zeros(rows, np.bool_)
        self._settings = RowSettings(rows, vocab)
        self._draw: Draw = TorchDraw(self._settings)
        if machine is not None:
            self._draw = NativeDraw(machine, self._settings)

    def admit(self, requests: Sequence[Admission]) -> None:
        """Learn how requests want to be sampled."""
        for admission in requests:
            self._residents[admission.rid] = Resident(admission)

    def attach(self, attachments: Sequence[Attachment]) -> None:
        """Hold admitted requests to grammars, from their beginning."""
        for attachment in attachments:
            self._residents[attachment.rid].matcher = attachment.grammar.matcher()

    def release(self, rids: Sequence[str]) -> None:
        """Forget ended requests; unknown ones are ignored."""
        for rid in rids:
            resident = self._residents.pop(rid, None)
            if resident is None:
                continue
            # Its row still leads to it, until another request is bound there.
            resident.matcher = None
            self._edits.leave(resident)

    def bind(self, row: int, rid: str) -> None:
        """From now on, `row` samples for `rid`, which may have sampled on another row before."""
        resident = self._residents.get(rid)
        if resident is None:
            raise InvariantError(f"row {row} is bound to request {rid!r}, which was never admitted")
        self._edits.enter(resident)
        self._rows[row] = resident
        self._edited[row] = resident.edits
        self._constrained[row] = resident.matcher is not None
        self._settings.bind(row, resident.admission.sampling)

    def sample(
        self,
        logits: Tensor,
        rows: IntArray,
        positions: IntArray,
        wanted: LogprobPlan | None = None,
    ) -> Sampled:
        """Draw one token for each of `rows`, to stand at `positions`.

        `logits` is `[rows, vocab]`, float32, and is changed. `wanted.indices` count
        these rows. Log probabilities are the model's own, before any edit.
        """
        if self._alone and len(rows) > 1:
            return _joined(
                [
                    self._sample(
                        logits[i : i + 1], rows[i : i + 1], positions[i : i + 1], _only(wanted, i)
                    )
                    for i in range(len(rows))
                ]
            )
        return self._sample(logits, rows, positions, wanted)

    def _sample(
        self, logits: Tensor, rows: IntArray, positions: IntArray, wanted: LogprobPlan | None
    ) -> Sampled:
        edited, constrained = self._edited[rows], self._constrained[rows]
        raw, places = logits, None
        telling = wanted is not None and len(wanted.indices)
        if wanted is not None and telling:
            places = on_device(self._device, wanted.indices.astype(np.int64))
            if edited.any() or constrained.any():
                raw, places = logits[places], None
        asking: Asking = [
            (index, self.resident(rows[index])) for index in map(int, np.flatnonzero(edited))
        ]
        failed = self._edits.apply(logits, asking, positions) if asking else []
        held = np.flatnonzero(constrained)
        matchers = [matcher for row in rows[held] if (matcher := self.resident(row).matcher)]
        faults: list[int] = []
        if matchers:
            handful, faults = mask(logits, held, matchers)
            tokens, best = self._drawn(logits, rows, positions, handful)
            # A matcher's failure is none of the numbers'.
            if faults:
                best[on_device(self._device, np.array(faults, np.int64))] = 0
        else:
            tokens, best = self._draw(logits, rows, positions)
        void = ~best.isfinite()
        stuck = (best == -torch.inf) & on_device(self._device, edited | constrained)
        if matchers:
            faults += advance(tokens, void, held, matchers)
        if asking:
            self._edits.remember(asking, tokens)
        looked: tuple[RowsLooked, ...] = ()
        if wanted is not None and telling:
            chosen = tokens[on_device(self._device, wanted.indices.astype(np.int64))]
            named = [self.resident(rows[i]).admission.logprob_ids for i in wanted.indices]
            looked = (row_logprobs(raw, chosen, wanted, named, places, self._machine),)
        return Sampled(
            tokens, void & ~stuck, stuck, looked, tuple(sorted(set(faults))), tuple(failed)
        )

    def resident(self, row: int) -> Resident:
        """Return the request that a row serves. Raises InvariantError if there was never one."""
        resident = self._rows[row]
        if resident is None:
            raise InvariantError(f"row {row} is in a batch, but no request was ever bound to it")
        return resident

    def _drawn(
        self, logits: Tensor, rows: IntArray, positions: IntArray, handful: Handful
    ) -> tuple[Tensor, Tensor]:
        """Draw, but the rows of a handful from what they have left."""
        if not len(handful.rows):
            return self._draw(logits, rows, positions)
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=self._device)
        best = logits.new_zeros(len(logits))
        others = np.delete(np.arange(len(logits)), handful.rows)
        few = handful.rows
        index, other = all_on_device(self._device, few, others)
        if len(others):
            tokens[other], best[other] = self._draw(
                logits, rows[others], positions[others], places=others
            )
        places, best[index] = self._draw(handful.logits, rows[few], positions[few], handful.ids)
        tokens[index] = handful.ids.gather(1, places.unsqueeze(1)).squeeze(1)
        return tokens, best

    def prompt_logprobs(
        self, spans: Sequence[PromptSpan], logits_of: Callable[[Tensor], Tensor]
    ) -> tuple[SpanLooked, ...]:
        """Look up what each span tells; see `logprobs.prompt_logprobs`."""
        return prompt_logprobs(spans, logits_of, self._device, self._machine)


def _only(wanted: LogprobPlan | None, row: int) -> LogprobPlan | None:
    """Return what is wanted of one row, as the only one of its batch."""
    if wanted is None:
        return None
    top = wanted.top[wanted.indices == row]
    return LogprobPlan(np.zeros_like(top), top)


def _joined(each: Sequence[Sampled]) -> Sampled:
    """Return what single rows drew as what their batch did."""
    return Sampled(
        torch.cat([one.tokens for one in each]),
        torch.cat([one.bad for one in each]),
        torch.cat([one.stuck for one in each]),
        tuple(
            replace(looked, indices=np.array([row], np.int32))
            for row, one in enumerate(each)
            for looked in one.looked
        ),
        tuple(row for row, one in enumerate(each) if one.faults),
        tuple(row for row, one in enumerate(each) if one.failed),
    )
