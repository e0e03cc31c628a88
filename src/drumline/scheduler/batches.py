"""The batch of a plan: prompt chunks and decodes as one forward's rows."""

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.contract.plan import Batch
from drumline.scheduler.admission import Chunk
from drumline.scheduler.decoding import Decodes
from drumline.scheduler.rows import Rows


def batch_of(
    chunks: list[Chunk], decodes: Decodes | None, rows: Rows, first_tokens: IntArray | None = None
) -> Batch | None:
    """Return the forward of `chunks` and `decodes`, None of neither.

    `first_tokens` is what decode rows feed that they did not sample.
    """
    if not chunks:
        if decodes is None:
            return None
        return Batch(
            rows=decodes.rows,
            generations=decodes.generations,
            input_lengths=decodes.input_lengths,
            prefix_lengths=_frozen(decodes.prefix_lengths),
            decode_ids=first_tokens,
        )
    chosen = np.array([chunk.request.row for chunk in chunks], np.int32)
    columns = [
        chosen,
        rows.generation[chosen],
        np.array([chunk.tokens for chunk in chunks], np.int32),
        np.array([chunk.start for chunk in chunks], np.int32),
    ]
    if decodes is not None:
        tails = (
            decodes.rows,
            decodes.generations,
            decodes.input_lengths,
            decodes.prefix_lengths,
        )
        columns = [np.concatenate(pair) for pair in zip(columns, tails, strict=True)]
    fed = [chunk.request.tokens[chunk.start : chunk.start + chunk.tokens] for chunk in chunks]
    prompts = np.array([chunk.request.prompt_tokens for chunk in chunks], np.int32)
    return Batch(
        rows=_frozen(columns[0]),
        generations=_frozen(columns[1]),
        input_lengths=_frozen(columns[2]),
        prefix_lengths=_frozen(columns[3]),
        extends=len(chunks),
        extend_ids=_frozen(np.concatenate(fed)),
        prompt_lengths=_frozen(prompts),
        next_ids=_frozen(np.array([chunk.next_id for chunk in chunks], np.int32)),
        decode_ids=first_tokens,
    )


def _frozen(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array
