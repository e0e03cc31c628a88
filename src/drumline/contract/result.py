"""What comes back from a forward, as plain host values."""

import msgspec
from msgspec import Struct

from drumline.contract.arrays import NO_INTS, IntArray, decode_array, encode_array


class RowLogprobs(Struct, frozen=True):
    """Log probabilities of one row's tokens.

    `top_*` has those of other tokens at each place: the k best, then the ids asked for by name.
    """

    index: int
    sampled: tuple[float, ...]
    top_values: tuple[tuple[float, ...], ...] = ()
    top_ids: tuple[tuple[int, ...], ...] = ()


class RowPooled(Struct, frozen=True):
    """What a chunk adds to the vector that its prompt becomes.

    `values` are the sum over its `tokens` prompt tokens, the first of which is the prompt's
    `start`, or what the last of them alone has, as the request's pooling says.
    """

    index: int
    start: int
    tokens: int
    values: tuple[float, ...]


class ForwardResult(Struct, frozen=True, kw_only=True, eq=False):
    """The sampled tokens of one forward, ragged over the batch's rows.

    `counts[i]` tokens of `tokens` belong to the batch's row `i`: none for a
    prefill chunk that does not reach its prompt's end, one for a plain decode.
    `nan_indices` are batch indices whose logits were not finite; their tokens
    mean nothing. `logprobs` has an entry for each index the dispatch asked for.
    """

    tokens: IntArray
    counts: IntArray
    nan_indices: IntArray = NO_INTS
    grammar_faults: IntArray = NO_INTS
    """Batch indices whose grammar could not go on; their tokens mean nothing."""
    stuck: IntArray = NO_INTS
    """Batch indices whose request forbids every token; their tokens mean nothing."""
    processor_faults: IntArray = NO_INTS
    """Batch indices whose logits processor failed; their tokens mean nothing."""
    logprobs: tuple[RowLogprobs, ...] = ()
    prompt_logprobs: tuple[RowLogprobs, ...] = ()
    """Those of the prompt tokens that a chunk tells; an entry for each index asked for."""
    pooled: tuple[RowPooled, ...] = ()
    """An entry for each index asked for."""


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
_decoder = msgspec.msgpack.Decoder(ForwardResult, dec_hook=decode_array)


def encode_result(result: ForwardResult) -> bytes:
    """Encode a result, its arrays as raw bytes."""
    return _encoder.encode(result)


def decode_result(data: bytes) -> ForwardResult:
    """Decode what `encode_result` made. Raises msgspec.DecodeError or ValidationError."""
    return _decoder.decode(data)
