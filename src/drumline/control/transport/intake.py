"""Turning what a frontend sent into the messages of a round.

It refuses what this engine cannot do, request by request, and puts the numbers that
it lets pass into ranges that arrays hold. What depends on the model, such as the
vocabulary or the context's length, is checked in the round.
"""

import math
from typing import Any

import msgspec
import numpy as np

from drumline.contract.arrays import IntArray
from drumline.contract.grammar import GrammarKey, GrammarKind
from drumline.contract.messages import Submitted
from drumline.contract.request import GenerateRequest, ProcessorCall, Sampling
from drumline.core.hashing import extra_keys, page_digests
from drumline.wire.codec import Buffer, MalformedFrameError, check_nesting, readable_rid
from drumline.wire.frames import decode_generate
from drumline.wire.own_params import NAME, OwnParams, own_params
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams, normalized, seed_of

INT32_MAX = (1 << 31) - 1
MOST_BYTES = 16 * 1024 * 1024
"""Of a message: some millions of tokens. What it becomes fits an exchange among ranks."""
_SEED_BITS = (1 << 63) - 1
_HOTTEST = 1e30
"""As hot as any: every token is equally likely long before, and float32 still holds it."""

_NOT_SUPPORTED = (
    "input_embeds",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "input_multi_ids",
    "multimodal_inputs",
    "bootstrap_room",
)
_NOT_SUPPORTED_SAMPLING = ("thinking_budget",)
_GRAMMARS = (
    GrammarKind.JSON_SCHEMA,
    GrammarKind.REGEX,
    GrammarKind.EBNF,
    GrammarKind.STRUCTURAL_TAG,
)
"""The kinds that have a place of their own on the wire, by that name."""


class RefusalError(Exception):
    """Why a request cannot be served; never leaves this module."""


def submitted(payload: Buffer, granularity: int) -> Submitted:
    """Return the request that an ADD's payload holds.

    A request that is refused or cannot be decoded comes back with `invalid` set, so
    that it is answered. Raises MalformedFrameError when not even its id can be read.
    `granularity` is the tokens of a hashed prefix page.
    """
    try:
        check_size(payload)
        request = decode_generate(payload)
    except MalformedFrameError as error:
        rid = readable_rid(payload)
        if rid is None:
            raise
        return _invalid(rid, f"the request is malformed: {error}")
    if not isinstance(request.rid, str) or not request.rid:
        raise MalformedFrameError(f"a request has one id, not {request.rid!r}")
    try:
        return Submitted(_translated(request.rid, request, granularity))
    except RefusalError as refusal:
        return _invalid(request.rid, str(refusal))


def check_size(payload: Buffer, most: int = MOST_BYTES) -> None:
    """Raise MalformedFrameError for a message with more bytes than any has a reason for."""
    if len(payload) > most:
        raise MalformedFrameError(f"it has {len(payload)} bytes; {most} are allowed")


def _invalid(rid: str, reason: str) -> Submitted:
    return Submitted(GenerateRequest(rid=rid, invalid=reason))


def _translated(rid: str, request: TokenizedGenerateReqInput, granularity: int) -> GenerateRequest:
    if request.validation_error is not None:
        raise RefusalError(request.validation_error)
    for name in _NOT_SUPPORTED:
        if getattr(request, name) not in (None, False):
            raise RefusalError(f"{name} is not supported by this engine")
    if request.logprob_start_len < -1:
        raise RefusalError(
            f"logprob_start_len is {request.logprob_start_len}; it is a place in the prompt, or -1"
        )
    if request.top_logprobs_num < 0:
        raise RefusalError(
            f"top_logprobs_num is {request.top_logprobs_num}; it must not be negative"
        )
    params = request.sampling_params
    _check(params)
    own = _own_params(params)
    ids = _ids("input_ids", request.input_ids or [])
    if not len(ids):
        raise RefusalError("input_ids is empty; a prompt has at least one token")
    return_logprob = request.return_logprob or params.logprobs is not None
    named = _ids("token_ids_logprob", request.token_ids_logprob or []).tolist()
    return GenerateRequest(
        rid=rid,
        input_ids=ids,
        sampling=_sampling(params, own, rid),
        max_new_tokens=_clipped(params.max_new_tokens),
        min_new_tokens=_clipped(params.min_new_tokens) or 0,
        stop_token_ids=tuple(_ids("stop_token_ids", sorted(params.stop_token_ids or ())).tolist()),
        ignore_eos=params.ignore_eos,
        stream=request.stream,
        return_logprob=return_logprob,
        top_logprobs=_clipped(request.top_logprobs_num) or 0 if return_logprob else 0,
        logprob_ids=tuple(named) if return_logprob else (),
        prompt_logprobs_from=_start(request, len(ids)) if return_logprob else -1,
        pooling=own.embed,
        page_digests=page_digests(ids, granularity, extra_keys(own.cache_salt)),
        cache_salt=own.cache_salt,
        priority=own.priority,
        deadline_us=0 if own.deadline_s is None else max(1, int(own.deadline_s * 1e6)),
        grammar=_grammar(params, own.choice),
        processors=tuple(ProcessorCall(*call) for call in own.logits_processors.items()),
    )


def _check(params: SamplingParams) -> None:
    """Raise RefusalError for sampling that this engine does not do."""
    if params.n != 1:
        raise RefusalError(f"n is {params.n}; a request has one answer, send one for each")
    if params.stop or params.stop_strs:
        raise RefusalError("stop strings are matched by the frontend; send stop_token_ids")
    if params.logprobs not in {None, 0}:
        raise RefusalError(f"logprobs is {params.logprobs}; only 0 is supported here")
    for name in _NOT_SUPPORTED_SAMPLING:
        if getattr(params, name) is not None:
            raise RefusalError(f"{name} is not supported by this engine")


def _own_params(params: SamplingParams) -> OwnParams:
    try:
        own = own_params(params.custom_params)
        check_nesting("logits_processors", own.logits_processors)
    except (msgspec.ValidationError, MalformedFrameError) as error:
        raise RefusalError(f"custom_params.{NAME}: {error}") from None
    return own


def _start(request: TokenizedGenerateReqInput, prompt_tokens: int) -> int:
    """Return the place from which log probabilities of the prompt are told."""
    start = request.logprob_start_len
    if start >= prompt_tokens:
        raise RefusalError(
            f"logprob_start_len is {start}; the prompt has {prompt_tokens} tokens, from 0 on"
        )
    return start


def _grammar(params: SamplingParams, choice: list[str] | None) -> GrammarKey | None:
    keys = [
        GrammarKey(kind, source)
        for kind in _GRAMMARS
        if (source := getattr(params, kind.value)) is not None
    ]
    if choice is not None:
        keys.append(GrammarKey(GrammarKind.CHOICE, msgspec.json.encode(choice).decode()))
    if len(keys) > 1:
        kinds = " and ".join(key.kind.value for key in keys)
        raise RefusalError(f"{kinds} are set together; an answer is held to one grammar")
    return keys[0] if keys else None


def _sampling(params: SamplingParams, own: OwnParams, rid: str) -> Sampling:
    # Normalizing twice changes nothing, so a sender's word for it need not be believed.
    params.is_normalized = False
    final = normalized(params)
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    ):
        if not math.isfinite(getattr(final, name)):
            raise RefusalError(f"{name} is {getattr(final, name)}; it must be finite")
    return Sampling(
        temperature=min(final.temperature, _HOTTEST),
        top_p=final.top_p,
        top_k=_clipped(final.top_k) or 0,
        min_p=final.min_p,
        frequency_penalty=final.frequency_penalty,
        presence_penalty=final.presence_penalty,
        repetition_penalty=final.repetition_penalty,
        logit_bias=_logit_bias(final.logit_bias or {}),
        typical_p=own.typical_p,
        bad_words=tuple(map(tuple, own.bad_words)),
        allowed_ids=tuple(own.allowed_ids or ()),
        seed=(seed_of(rid) if final.seed is None else final.seed) & _SEED_BITS,
    )


def _logit_bias(entries: dict[str, Any]) -> dict[int, float]:
    try:
        bias = {int(key): float(value) for key, value in entries.items()}
    except ValueError:
        raise RefusalError("logit_bias maps token ids to numbers") from None
    _ids("logit_bias", list(bias))
    if not all(map(math.isfinite, bias.values())):
        raise RefusalError("logit_bias has a value that is not finite")
    return bias


def _ids(name: str, values: list[int]) -> IntArray:
    try:
        return np.array(values, np.int32)
    except OverflowError:
        raise RefusalError(f"{name} has a token id that is none in any vocabulary") from None


def _clipped(value: int | None) -> int | None:
    """Return `value` as an int32 array can hold it."""
    return None if value is None else max(-INT32_MAX, min(value, INT32_MAX))
