"""What requests change of their logits before a token is drawn.

In this order: biases; ids that may not come (ends before the minimum, words that were
forbidden, all but those allowed); penalties; registered processors. Rows that ask for
nothing cost nothing. Grammars are not among it, see `constraints`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from drumline.contract.arrays import IntArray
from drumline.device.kernels.native import Machine
from drumline.device.sampling.history import Histories
from drumline.device.sampling.processors import LogitsProcessor, process
from drumline.device.sampling.resident import Resident
from drumline.device.sampling.tails import Tails
from drumline.device.staging import Download, all_on_device, on_device

Places = np.ndarray[tuple[int], np.dtype[np.int64]]

Asking = Sequence[tuple[int, Resident]]
"""The requests of a batch that change their logits, each with its row of them."""


class Edits:
    """Applies the edits of a batch, and remembers what they need of each request."""

    __slots__ = ("_device", "_histories", "_processors", "_tails", "_vocab")

    def __init__(
        self,
        vocab: int,
        processors: Mapping[str, LogitsProcessor],
        device: torch.device,
        machine: Machine | None = None,
    ) -> None:
        self._device = device
        self._vocab = vocab
        self._processors = processors
        self._histories = Histories(vocab, device, machine)
        self._tails = Tails(device)

    def enter(self, resident: Resident) -> None:
        """Give a request that has a row what is remembered of it; once is enough."""
        prompt = resident.admission.prompt_ids
        if resident.penalized and resident.count_slot is None:
            resident.count_slot = self._histories.take(prompt)
        if len(resident.phrases[1]) and resident.tail_slot is None:
            resident.tail_slot = self._tails.take(prompt)

    def leave(self, resident: Resident) -> None:
        """Forget a request."""
        if resident.count_slot is not None:
            self._histories.give_back(resident.count_slot)
        if resident.tail_slot is not None:
            self._tails.give_back(resident.tail_slot)

    def apply(self, logits: Tensor, asking: Asking, positions: IntArray) -> list[int]:
        """Change `logits`, `[rows, vocab]`; returns the rows whose processor failed."""
        flat = logits.view(-1)
        biased = [(row, one) for row, one in asking if len(one.bias_ids)]
        if biased:
            places, values = all_on_device(
                self._device,
                self._places([(row, one.bias_ids) for row, one in biased]),
                np.concatenate([one.bias_values for _, one in biased]),
            )
            flat.index_add_(0, places, values)
        hidden = [
            (row, ids)
            for row, one in asking
            for ids in (one.banned_ids, self._early(one, int(positions[row])))
            if len(ids)
        ]
        if hidden:
            flat.index_fill_(0, on_device(self._device, self._places(hidden)), -torch.inf)
        self._ban_phrases(logits, asking)
        self._penalize(logits, [(row, one) for row, one in asking if one.penalized])
        # Behind the penalties, which an id that is not allowed must not come back by.
        self._allow(logits, asking)
        return self._process(logits, asking)

    def remember(self, asking: Asking, tokens: Tensor) -> None:
        """Note what the rows drew."""
        counted = [(row, one.count_slot) for row, one in asking if one.count_slot is not None]
        if counted:
            rows, slots = on_device(self._device, np.array(counted, np.int64)).unbind(1)
            self._histories.count(slots, tokens[rows])
        tailed = [(row, one.tail_slot) for row, one in asking if one.tail_slot is not None]
        if tailed:
            rows, slots = on_device(self._device, np.array(tailed, np.int64)).unbind(1)
            self._tails.append(slots, tokens[rows])
        processed = [(row, one) for row, one in asking if one.admission.processors]
        if processed:
            drawn = Download([tokens], self._device).wait()[0].tolist()
            for row, one in processed:
                one.answer.append(drawn[row])

    def _places(self, ids: Sequence[tuple[int, Places]]) -> Places:
        """Return where ids of rows lie in the flat logits."""
        return np.concatenate([part + row * self._vocab for row, part in ids])

    @staticmethod
    def _early(resident: Resident, position: int) -> Places:
        """Return the ids that would end a request before its minimum."""
        admission = resident.admission
        early = position - admission.prompt_tokens < admission.min_new_tokens
        return resident.stop_ids if early else resident.stop_ids[:0]

    def _ban_phrases(self, logits: Tensor, asking: Asking) -> None:
        rows, slots, phrases = [], [], []
        for row, one in asking:
            if one.tail_slot is not None:
                rows.append(row)
                slots.append(one.tail_slot)
                phrases.append(one.phrases)
        if rows:
            self._tails.ban(logits, rows, slots, phrases)

    def _allow(self, logits: Tensor, asking: Asking) -> None:
        narrow = [(row, one.allowed_ids) for row, one in asking if len(one.allowed_ids)]
        if not narrow:
            return
        flat = logits.view(-1)
        places, rows = all_on_device(
            self._device, self._places(narrow), np.array([row for row, _ in narrow], np.int64)
        )
        kept = flat[places]
        logits.index_fill_(0, rows, -torch.inf)
        flat[places] = kept

    def _penalize(self, logits: Tensor, penalized: Asking) -> None:
        if not penalized:
            return
        samplings = [one.admission.sampling for _, one in penalized]
        index, slots = all_on_device(
            self._device,
            np.array([row for row, _ in penalized], np.int64),
            np.array([one.count_slot for _, one in penalized], np.int64),
        )
        self._histories.penalize(
            logits,
            index,
            slots,
            np.array([sampling.repetition_penalty for sampling in samplings], np.float32),
            np.array([sampling.frequency_penalty for sampling in samplings], np.float32),
            np.array([sampling.presence_penalty for sampling in samplings], np.float32),
        )

    def _process(self, logits: Tensor, asking: Asking) -> list[int]:
        failed: list[int] = []
        for name, processor in self._processors.items():
            rows = [
                (row, one, call.params)
                for row, one in asking
                for call in one.admission.processors
                if call.name == name and row not in failed
            ]
            if rows:
                failed += process(name, processor, logits, rows)
        return failed
