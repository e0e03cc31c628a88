"""Logits processors that an operator installed and named: code of a package, never of a request.

A package registers a factory as an entry point of the group `drumline.logits_processors`;
`--logits-processors` names those that are loaded, and requests name those they want.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from torch import Tensor

from drumline.contract.arrays import IntArray
from drumline.core.errors import ConfigError
from drumline.device.guards import waiting_for
from drumline.device.sampling.resident import Resident
from drumline.device.staging import on_device

GROUP = "drumline.logits_processors"

_log = logging.getLogger(__name__)


class ProcessedRow(Struct, frozen=True, eq=False):
    """One request whose logits a processor is given. Nothing of it may be changed."""

    rid: str
    params: Any
    """What the request handed the processor, as JSON holds it."""
    prompt: IntArray
    answer: Sequence[int]
    """The tokens it drew so far."""


class LogitsProcessor(Protocol):
    """Changes the logits of the rows that ask for it.

    Thread: forward thread. Every rank of a tensor-parallel group runs it on the same rows
    and must come to the same logits: it reads no clock and draws no lots of its own.
    """

    def process(self, logits: Tensor, rows: Sequence[ProcessedRow]) -> None:
        """Change `logits`, float32 `[rows, vocab]`, in place.

        What it raises ends the requests it raises it for, and no others.
        """


Factory = Callable[[int], LogitsProcessor]
"""What an entry point names: it is given the vocabulary's size."""


def load_processors(names: Sequence[str], vocab: int) -> Mapping[str, LogitsProcessor]:
    """Return the registered processors of these names, made for a vocabulary.

    Raises ConfigError for a name that nobody registered, or whose code does not load.
    """
    if not names:
        return {}
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    made: dict[str, LogitsProcessor] = {}
    for name in names:
        entry = known.get(name)
        if entry is None:
            registered = ", ".join(sorted(known)) or "none"
            raise ConfigError(
                "--logits-processors",
                f"{name!r} is not registered under the entry points {GROUP!r}; {registered} is",
            )
        try:
            factory: Factory = entry.load()
            made[name] = factory(vocab)
        except Exception as error:  # whatever foreign code does while it loads
            raise ConfigError(
                "--logits-processors", f"{name!r} ({entry.value}) does not load: {error!r}"
            ) from error
    return made


def process(
    name: str,
    processor: LogitsProcessor,
    logits: Tensor,
    asking: Sequence[tuple[int, Resident, Any]],
) -> list[int]:
    """Run a processor over the rows `asking`; returns those it failed for, which stay as they were.

    All at once. Only when that fails one by one, to find whose fault it is.
    """
    try:
        _run(processor, logits, asking)
    except Exception:  # foreign code fails as it likes
        failed = []
        for one in asking:
            try:
                _run(processor, logits, [one])
            except Exception:
                _log.exception("logits processor %r failed for request %r", name, one[1])
                failed.append(one[0])
        return failed
    return []


def _run(
    processor: LogitsProcessor, logits: Tensor, asking: Sequence[tuple[int, Resident, Any]]
) -> None:
    index = on_device(logits.device, np.array([row for row, _, _ in asking], np.int64))
    part = logits[index]
    rows = [
        ProcessedRow(one.admission.rid, params, one.admission.prompt_ids, one.answer)
        for _, one, params in asking
    ]
    # Foreign code reads tensors as it likes.
    with waiting_for(logits.device):
        processor.process(part, rows)
    logits[index] = part
