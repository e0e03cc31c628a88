"""The last tokens of requests whose next one depends on them: words that must not be said."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drumline.contract.arrays import IntArray
from drumline.contract.request import MAX_BAD_WORD_TOKENS
from drumline.device.staging import all_on_device, on_device

_WIDTH = MAX_BAD_WORD_TOKENS - 1
_NO_TOKEN = -2
_ANY_TOKEN = -1

Ids = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

Phrases = tuple[Ids, Ids]
"""The beginnings of phrases, `[phrases, width]`, right-aligned behind `_ANY_TOKEN`, and their
last tokens, `[phrases]`."""


class Tails:
    """Per slot, the tokens before the next one, prompt included."""

    __slots__ = ("_device", "_free", "_tails")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[int] = []
        self._tails = torch.zeros((0, _WIDTH), dtype=torch.int64, device=device)

    def take(self, prompt: IntArray) -> int:
        """Return a slot whose request has read `prompt` and said nothing."""
        if not self._free:
            held = len(self._tails)
            added = max(4, held)
            self._free.extend(range(held + added - 1, held - 1, -1))
            self._tails = torch.cat((self._tails, self._tails.new_zeros((added, _WIDTH))))
        slot = self._free.pop()
        tail = np.full(_WIDTH, _NO_TOKEN, np.int64)
        last = prompt[-_WIDTH:]
        tail[_WIDTH - len(last) :] = last
        self._tails[slot] = on_device(self._device, tail)
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot."""
        self._free.append(slot)

    def append(self, slots: Tensor, tokens: Tensor) -> None:
        """Note that `slots[i]` said `tokens[i]`."""
        self._tails[slots] = torch.cat((self._tails[slots, 1:], tokens.unsqueeze(1)), 1)

    def ban(
        self, logits: Tensor, rows: Sequence[int], slots: Sequence[int], phrases: Sequence[Phrases]
    ) -> None:
        """Hide from each row of `logits`, `[…, vocab]`, the tokens that would end a phrase."""
        counts = [len(last) for _, last in phrases]
        lasts = np.concatenate([last for _, last in phrases])
        owners, places, beginnings = all_on_device(
            self._device,
            np.repeat(np.array(slots, np.int64), counts),
            np.repeat(np.array(rows, np.int64), counts) * logits.shape[1] + lasts,
            np.concatenate([beginning for beginning, _ in phrases]),
        )
        said = self._tails[owners]
        due = ((said == beginnings) | (beginnings == _ANY_TOKEN)).all(1)
        hidden = logits.new_zeros(len(places)).masked_fill_(due, -torch.inf)
        logits.view(-1).index_add_(0, places, hidden)


def phrases_of(words: Sequence[tuple[int, ...]]) -> Phrases:
    """Return words of at least two tokens, ready to be compared with tails."""
    beginnings = np.full((len(words), _WIDTH), _ANY_TOKEN, np.int64)
    for index, word in enumerate(words):
        beginnings[index, _WIDTH - len(word) + 1 :] = word[:-1]
    lasts = np.array([word[-1] for word in words], np.int64)
    return beginnings, lasts
