"""The batch of a plan: prompt chunks and decodes as one forward's rows."""

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.contract.plan import Batch
from drumline.scheduler.chunk import Chunk
from drumline.scheduler.decoding import Decodes
from drumline.scheduler.rows import Rows


def batch_of(
    chunks: list[Chunk], decodes: Decodes | None, rows: Rows, named: IntArray | None = None
) -> Batch | None:
    """Return the forward of `chunks` and `decodes`, None of neither.

    `named` is what decode rows feed where the data plane has not what they sampled, else -1.
    """
    if not chunks:
        if decodes is None:
            return None
        return Batch(
            rows=decodes.rows,
            generations=decodes.generations,
            input_lengths=decodes.input_lengths,
            prefix_lengths=_frozen(decodes.prefix_lengths),
            decode_ids=None if named is None else _frozen(named),
        )
    requests = [chunk.request for chunk in chunks]
    chosen = [request.row for request in requests]
    # One array with a line for each fact, as few chunks cost what making arrays costs.
    facts = np.array(
        [
            *chosen,
            *[rows.generation_of[row] for row in chosen],
            *[chunk.tokens for chunk in chunks],
            *[chunk.start for chunk in chunks],
            *[request.prompt_tokens for request in requests],
            *[chunk.next_id for chunk in chunks],
        ],
        np.int32,
    )
    facts.setflags(write=False)
    *columns, prompts, nexts = facts.reshape(6, len(chunks))
    if decodes is not None:
        tails = (
            decodes.rows,
            decodes.generations,
            decodes.input_lengths,
            decodes.prefix_lengths,
        )
        columns = [_frozen(np.concatenate(pair)) for pair in zip(columns, tails, strict=True)]
    fed = [chunk.request.tokens[chunk.start : chunk.start + chunk.tokens] for chunk in chunks]
    return Batch(
        rows=columns[0],
        generations=columns[1],
        input_lengths=columns[2],
        prefix_lengths=columns[3],
        extends=len(chunks),
        extend_ids=_frozen(fed[0] if len(fed) == 1 else np.concatenate(fed)),
        prompt_lengths=prompts,
        next_ids=nexts,
        decode_ids=None if named is None else _frozen(named),
    )


def _frozen(array: IntArray) -> IntArray:
    array.setflags(write=False)
    return array
