"""The sampler: each pool row's way of drawing, applied to a batch's logits."""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from drumline.contract.arrays import IntArray
from drumline.contract.grammar import Attachment, Matcher
from drumline.contract.ports import LogprobPlan
from drumline.contract.request import Admission
from drumline.contract.result import RowLogprobs
from drumline.core.errors import InvariantError
from drumline.device.sampling.constraints import Handful, advance, mask
from drumline.device.sampling.draw import DrawSettings, draw, of_rows
from drumline.device.sampling.history import Histories
from drumline.device.sampling.lots import uniform


class _Resident:
    """What is kept of an admitted request, wherever it runs."""

    __slots__ = ("admission", "bias_ids", "bias_values", "matcher", "slot", "stop_ids")

    def __init__(self, admission: Admission) -> None:
        bias = admission.sampling.logit_bias
        self.admission = admission
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self.stop_ids = np.array(admission.stop_token_ids, np.int64)
        self.slot: int | None = None
        self.matcher: Matcher | None = None

    @property
    def penalized(self) -> bool:
        sampling = self.admission.sampling
        return (
            sampling.repetition_penalty != 1
            or sampling.frequency_penalty != 0
            or sampling.presence_penalty != 0
        )

    @property
    def edits(self) -> bool:
        """Whether logits are changed before they are drawn from."""
        suppresses = self.admission.min_new_tokens > 0 and len(self.stop_ids) > 0
        return self.penalized or suppresses or len(self.bias_ids) > 0


class Sampled(Struct, frozen=True, eq=False):
    """One token a row, which rows' logits were not finite, and the log probabilities asked for.

    `faults` are the rows whose grammar could not go on.
    """

    tokens: Tensor
    bad: Tensor
    logprobs: tuple[RowLogprobs, ...] = ()
    faults: tuple[int, ...] = ()


class Sampler:
    """Draws tokens for pool rows, as the requests bound to them ask."""

    __slots__ = (
        "_constrained",
        "_edits",
        "_greedy",
        "_histories",
        "_min_p",
        "_residents",
        "_rows",
        "_seed",
        "_temperature",
        "_top_k",
        "_top_p",
        "_vocab",
    )

    def __init__(self, rows: int, vocab: int) -> None:
        self._vocab = vocab
        self._residents: dict[str, _Resident] = {}
        self._rows: list[_Resident | None] = [None] * rows
        self._histories = Histories(vocab)
        self._greedy = np.ones(rows, np.bool_)
        self._edits = np.zeros(rows, np.bool_)
        self._constrained = np.zeros(rows, np.bool_)
        self._temperature = np.ones(rows, np.float32)
        self._top_p = np.ones(rows, np.float32)
        self._min_p = np.zeros(rows, np.float32)
        self._top_k = np.full(rows, vocab, np.int32)
        self._seed = np.zeros(rows, np.uint64)

    def admit(self, requests: Sequence[Admission]) -> None:
        """Learn how requests want to be sampled."""
        for admission in requests:
            self._residents[admission.rid] = _Resident(admission)

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
            if resident.slot is not None:
                self._histories.give_back(resident.slot)

    def bind(self, row: int, rid: str) -> None:
        """From now on, `row` samples for `rid`, which may have sampled on another row before."""
        resident = self._residents.get(rid)
        if resident is None:
            raise InvariantError(f"row {row} is bound to request {rid!r}, which was never admitted")
        if resident.penalized and resident.slot is None:
            resident.slot = self._histories.take(resident.admission.prompt_ids)
        sampling = resident.admission.sampling
        self._rows[row] = resident
        self._greedy[row] = sampling.greedy
        self._edits[row] = resident.edits
        self._constrained[row] = resident.matcher is not None
        self._temperature[row] = sampling.temperature
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._top_k[row] = min(sampling.top_k, self._vocab)
        self._seed[row] = sampling.seed & 0xFFFFFFFFFFFFFFFF

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
        raw = None
        if wanted is not None and len(wanted.indices):
            raw = logits[torch.from_numpy(wanted.indices.astype(np.int64))]
        if self._edits[rows].any():
            self._edit(logits, rows, positions)
        held = np.flatnonzero(self._constrained[rows])
        matchers = [matcher for row in rows[held] if (matcher := self._resident(row).matcher)]
        faults: list[int] = []
        settings = self._settings(rows, positions)
        if matchers:
            handful, faults = mask(logits, held, matchers)
            tokens, bad = _drawn(logits, settings, handful)
            # Nothing that fits is no fault of the numbers.
            bad[faults] = False
            faults += advance(tokens, bad, held, matchers)
        else:
            tokens, bad = draw(logits, settings)
        self._remember(rows, tokens)
        told = () if wanted is None or raw is None else _logprobs(raw, tokens, wanted)
        return Sampled(tokens, bad, told, tuple(sorted(set(faults))))

    def _settings(self, rows: IntArray, positions: IntArray) -> DrawSettings:
        return DrawSettings(
            self._greedy[rows],
            self._temperature[rows],
            self._top_k[rows],
            self._top_p[rows],
            self._min_p[rows],
            uniform(self._seed[rows], positions.astype(np.int64)),
        )

    def _edit(self, logits: Tensor, rows: IntArray, positions: IntArray) -> None:
        biased, biases, hidden, penalized = [], [], [], []
        for index in np.flatnonzero(self._edits[rows]):
            resident = self._resident(rows[index])
            admission = resident.admission
            if len(resident.bias_ids):
                biased.append(resident.bias_ids + index * self._vocab)
                biases.append(resident.bias_values)
            if positions[index] - admission.prompt_tokens < admission.min_new_tokens:
                hidden.append(resident.stop_ids + index * self._vocab)
            if resident.penalized:
                penalized.append(index)
        flat = logits.view(-1)
        if biased:
            places = torch.from_numpy(np.concatenate(biased))
            flat.index_add_(0, places, torch.from_numpy(np.concatenate(biases)))
        if hidden:
            flat.index_fill_(0, torch.from_numpy(np.concatenate(hidden)), -torch.inf)
        if penalized:
            self._penalize(logits, rows, np.array(penalized, np.int64))

    def _penalize(
        self, logits: Tensor, rows: IntArray, chosen: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> None:
        residents = [self._resident(row) for row in rows[chosen]]
        penalties = np.array(
            [
                (
                    resident.admission.sampling.repetition_penalty,
                    resident.admission.sampling.frequency_penalty,
                    resident.admission.sampling.presence_penalty,
                )
                for resident in residents
            ],
            np.float32,
        ).T
        index = torch.from_numpy(chosen)
        slots = torch.tensor([resident.slot for resident in residents])
        logits[index] = self._histories.penalize(logits[index], slots, *penalties.copy())

    def _remember(self, rows: IntArray, tokens: Tensor) -> None:
        indices, slots = [], []
        for index in np.flatnonzero(self._edits[rows]):
            slot = self._resident(rows[index]).slot
            if slot is not None:
                indices.append(int(index))
                slots.append(slot)
        if slots:
            self._histories.count(torch.tensor(slots), tokens[indices])

    def _resident(self, row: int) -> _Resident:
        resident = self._rows[row]
        if resident is None:
            raise InvariantError(f"row {row} is in a batch, but no request was ever bound to it")
        return resident


def _drawn(logits: Tensor, settings: DrawSettings, handful: Handful) -> tuple[Tensor, Tensor]:
    """Draw like `draw`, but the rows of a handful from what they have left."""
    if not len(handful.rows):
        return draw(logits, settings)
    tokens = torch.zeros(len(logits), dtype=torch.int64)
    bad = torch.zeros(len(logits), dtype=torch.bool)
    others = np.delete(np.arange(len(logits)), handful.rows)
    if len(others):
        index = torch.from_numpy(others)
        tokens[index], bad[index] = draw(logits[index], of_rows(settings, others))
    index = torch.from_numpy(handful.rows)
    places, bad[index] = draw(handful.logits, of_rows(settings, handful.rows))
    tokens[index] = handful.ids.gather(1, places.unsqueeze(1)).squeeze(1)
    return tokens, bad


def _logprobs(raw: Tensor, tokens: Tensor, wanted: LogprobPlan) -> tuple[RowLogprobs, ...]:
    """Return the log probabilities of the rows `wanted`, whose logits are `raw`."""
    logprobs = raw.log_softmax(1)
    chosen = tokens[torch.from_numpy(wanted.indices.astype(np.int64))].unsqueeze(1)
    sampled = logprobs.gather(1, chosen).squeeze(1).tolist()
    most = min(int(wanted.top.max(initial=0)), raw.shape[1])
    values, ids = (part.tolist() for part in logprobs.topk(most, 1))
    return tuple(
        RowLogprobs(
            int(index),
            (sampled[place],),
            (tuple(values[place][:top]),) if top else (),
            (tuple(ids[place][:top]),) if top else (),
        )
        for place, (index, top) in enumerate(zip(wanted.indices, wanted.top, strict=True))
    )
