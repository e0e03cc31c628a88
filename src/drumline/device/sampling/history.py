"""What requests with penalties have read and said, counted by token."""

import numpy as np
import torch
from torch import Tensor

from drumline.contract.arrays import FloatArray, IntArray
from drumline.device.kernels.native import Machine
from drumline.device.staging import all_on_device, on_device


class Histories:
    """Per slot, which tokens the prompt holds and how often each token was sampled.

    Slots are given to requests that ask for a penalty, and to no others: a slot
    costs five bytes for each token of the vocabulary.
    """

    __slots__ = ("_device", "_free", "_machine", "_prompted", "_sampled", "_vocab")

    def __init__(self, vocab: int, device: torch.device, machine: Machine | None = None) -> None:
        """Hold none; kernels penalize where there is a `machine` to run them."""
        self._device = device
        self._vocab = vocab
        self._machine = machine
        self._free: list[int] = []
        self._prompted = torch.zeros((0, vocab), dtype=torch.bool, device=device)
        self._sampled = torch.zeros((0, vocab), dtype=torch.int32, device=device)

    def take(self, prompt: IntArray) -> int:
        """Return a slot whose prompt is `prompt` and that has sampled nothing."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._prompted[slot] = False
        self._sampled[slot] = 0
        read = on_device(self._device, prompt.astype(np.int64))
        self._prompted[slot].index_fill_(0, read, True)
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot."""
        self._free.append(slot)

    def count(self, slots: Tensor, tokens: Tensor) -> None:
        """Note that `slots[i]` sampled `tokens[i]`."""
        flat = self._sampled.view(-1)
        flat.index_add_(0, slots * self._vocab + tokens, torch.ones_like(tokens, dtype=torch.int32))

    def penalize(
        self,
        logits: Tensor,
        rows: Tensor,
        slots: Tensor,
        repetition: FloatArray,
        frequency: FloatArray,
        presence: FloatArray,
    ) -> None:
        """Penalize the rows of `logits`, `[…, vocab]`, each by its slot.

        Repetition divides what is above zero and multiplies what is below, for each
        token of prompt and answer; frequency and presence are subtracted for tokens
        of the answer, the one times the count, the other once.
        """
        if self._machine is not None:
            self._machine.run(
                "penalize",
                logits.data_ptr(),
                self._vocab,
                len(rows),
                rows.data_ptr(),
                slots.data_ptr(),
                self._prompted.data_ptr(),
                self._sampled.data_ptr(),
                *(torch.from_numpy(each).data_ptr() for each in (repetition, frequency, presence)),
            )
            return
        chosen = logits[rows]
        sampled = self._sampled[slots]
        said = sampled > 0
        factor, often, once = (
            each.unsqueeze(1)
            for each in all_on_device(self._device, repetition, frequency, presence)
        )
        repeated = torch.where(chosen > 0, chosen / factor, chosen * factor)
        chosen = repeated.where(said | self._prompted[slots], chosen)
        chosen -= often * sampled
        chosen -= once * said
        logits[rows] = chosen

    def _grow(self) -> None:
        held = len(self._sampled)
        added = max(4, held)
        self._free.extend(range(held + added - 1, held - 1, -1))
        self._prompted = _longer(self._prompted, added)
        self._sampled = _longer(self._sampled, added)


def _longer(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat((tensor, tensor.new_zeros((rows, tensor.shape[1]))))
