"""What the sampler keeps of an admitted request, wherever it runs."""

import numpy as np

from drumline.contract.grammar import Matcher
from drumline.contract.request import Admission
from drumline.device.sampling.tails import phrases_of


class Resident:
    """A request's wishes as arrays, its slots in the stores that follow it, and its matcher."""

    __slots__ = (
        "admission",
        "allowed_ids",
        "answer",
        "banned_ids",
        "bias_ids",
        "bias_values",
        "count_slot",
        "matcher",
        "phrases",
        "stop_ids",
        "tail_slot",
    )

    def __init__(self, admission: Admission) -> None:
        sampling = admission.sampling
        bias = sampling.logit_bias
        self.admission = admission
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self.stop_ids = np.array(admission.stop_token_ids, np.int64)
        self.banned_ids = np.array([w[0] for w in sampling.bad_words if len(w) == 1], np.int64)
        self.allowed_ids = np.array(sampling.allowed_ids, np.int64)
        self.phrases = phrases_of([word for word in sampling.bad_words if len(word) > 1])
        self.matcher: Matcher | None = None
        self.count_slot: int | None = None
        self.tail_slot: int | None = None
        self.answer: list[int] = []
        """What it said so far; kept for logits processors alone."""

    def __repr__(self) -> str:
        return f"Resident({self.admission.rid!r})"

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
        """Whether logits are changed before they are drawn from, a grammar's mask aside."""
        admission = self.admission
        sampling = admission.sampling
        suppresses = admission.min_new_tokens > 0 and len(self.stop_ids) > 0
        restricts = bool(sampling.bad_words or sampling.allowed_ids)
        return (
            self.penalized
            or suppresses
            or restricts
            or len(self.bias_ids) > 0
            or bool(admission.processors)
        )
