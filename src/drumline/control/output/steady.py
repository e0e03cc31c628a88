"""A batch that decodes as it did the last time, and what that makes constant.

It knows the arrays of one batch and nothing of the requests' lives.
"""

import numpy as np
import numpy.typing as npt

from drumline.contract.arrays import IntArray
from drumline.contract.plan import Batch
from drumline.contract.result import ForwardResult
from drumline.control.requests import Request


class Steady:
    """A batch whose every row decoded alike the last time, and what that makes constant.

    While nobody starts, ends or changes rows, the rows' counts live here and each
    commit is a few vector operations. `headroom` is how many tokens every row may still
    produce before the first one reaches its length.
    """

    __slots__ = (
        "cached_tokens",
        "generations",
        "headroom",
        "loud",
        "ones",
        "produced",
        "prompt_tokens",
        "quiet",
        "rids",
        "rows",
    )

    def __init__(
        self,
        batch: Batch,
        requests: list[Request],
        produced: IntArray,
        headroom: int,
        streams: npt.NDArray[np.bool_],
    ) -> None:
        self.rows = batch.rows
        self.generations = batch.generations
        self.ones = np.ones(len(batch.rows), np.int32).tobytes()
        self.produced = produced
        self.headroom = headroom
        self.quiet = np.flatnonzero(~streams)
        self.loud = np.flatnonzero(streams) if len(self.quiet) else None
        told = [request for request in requests if request.stream]
        self.rids = [request.rid for request in told]
        self.prompt_tokens = [request.prompt_tokens for request in told]
        self.cached_tokens = [request.cached_tokens for request in told]

    def fits(self, batch: Batch, result: ForwardResult) -> bool:
        """Whether a forward is one of this batch and brings one token a row."""
        return (
            batch.rows is self.rows
            and batch.generations is self.generations
            and self.headroom > 1
            and not len(result.nan_indices)
            and not len(result.grammar_faults)
            and not len(result.stuck)
            and not len(result.processor_faults)
            and len(result.tokens) == len(self.rows)
            and result.counts.tobytes() == self.ones
        )
