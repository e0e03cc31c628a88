"""Checks a request against what the engine serves, and resolves its budget.

It knows the model's facts and the pool's size, and neither who asks nor what runs:
a request is admitted or refused by its own content alone, so every rank of a
replica decides alike. An id that is already in use is the loop's matter.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct

from drumline.contract.arrays import NO_INTS
from drumline.contract.request import (
    MAX_BAD_WORD_TOKENS,
    Admission,
    GenerateRequest,
    Pooling,
    Sampling,
)
from drumline.contract.specs import DeviceSpecs
from drumline.control.requests import CLIENT_ERROR, Admitted, Ending, Reason, Refusal, Request
from drumline.core.errors import quoted
from drumline.scheduler.events import RequestSpec

MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
_NO_CAP = (1 << 31) - 1
MAX_PENALTY = 2.0
MAX_BIAS = 100.0


class Limits(Struct, frozen=True, kw_only=True):
    """What a request is measured against."""

    vocab_size: int
    context_tokens: int
    """Longest prompt plus answer."""
    pool_tokens: int
    """Longest request that the KV pool holds when it runs alone."""
    eos_token_ids: tuple[int, ...]
    grammars: bool = False
    """Whether answers may be held to grammars."""
    processors: frozenset[str] = frozenset()
    """The logits processors that were loaded."""

    @classmethod
    def of(
        cls,
        specs: DeviceSpecs,
        max_request_tokens: int,
        *,
        grammars: bool = False,
        processors: Iterable[str] = (),
    ) -> "Limits":
        """Return the limits of a device on which one request may grow to `max_request_tokens`."""
        return cls(
            vocab_size=specs.model.vocab_size,
            context_tokens=specs.model.max_model_len,
            pool_tokens=max_request_tokens,
            eos_token_ids=specs.model.eos_token_ids,
            grammars=grammars,
            processors=frozenset(processors),
        )


class Ingress:
    """The door of the engine."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def admit(self, asked: GenerateRequest, now_us: int) -> Admitted | Refusal:
        """Return what `asked` becomes here, or why it cannot be served."""
        for fault in self._faults(asked):
            return self.refusal(asked, fault)
        limits = self._limits
        prompt = len(asked.input_ids)
        room = min(limits.context_tokens, limits.pool_tokens) - prompt
        budget = room if asked.max_new_tokens is None else min(asked.max_new_tokens, room)
        # An id that the model cannot produce never stops a request; gateways send the
        # tokenizer's whole list, which may reach beyond the model's vocabulary.
        stops = frozenset(i for i in asked.stop_token_ids if 0 <= i < limits.vocab_size)
        # A grammar ends with eos, whatever else is asked.
        if not asked.ignore_eos or asked.grammar is not None:
            stops |= frozenset(limits.eos_token_ids)
        return Admitted(
            Request(asked, prompt_tokens=prompt, limit=budget, stops=stops, now_us=now_us),
            Admission(
                rid=asked.rid,
                prompt_tokens=prompt,
                prompt_ids=asked.input_ids if _prompt_is_read(asked) else NO_INTS,
                sampling=asked.sampling,
                min_new_tokens=asked.min_new_tokens,
                stop_token_ids=tuple(sorted(stops)),
                logprob_ids=asked.logprob_ids,
                prompt_logprobs_from=asked.prompt_logprobs_from,
                pooling=asked.pooling,
                processors=asked.processors,
            ),
            RequestSpec(
                rid=asked.rid,
                tokens=asked.input_ids,
                # Nothing is reserved for an answer nobody bounded: almost all end long before.
                max_new_tokens=0 if asked.max_new_tokens is None else budget,
                # What is told of a position must be computed here, and cached pages tell nothing.
                max_cached_prefix_tokens=_most_cached(asked),
                page_digests=asked.page_digests,
                cache_salt=asked.cache_salt,
                priority=asked.priority,
            ),
        )

    @staticmethod
    def refusal(asked: GenerateRequest, fault: str, status: int = CLIENT_ERROR) -> Refusal:
        """Return the refusal of `asked` because of `fault`."""
        return Refusal(asked.rid, len(asked.input_ids), Ending(Reason.ABORT, fault, status))

    def _faults(self, asked: GenerateRequest) -> Iterator[str]:
        if asked.invalid is not None:
            yield asked.invalid
            return
        limits = self._limits
        prompt = len(asked.input_ids)
        if not asked.rid:
            yield "rid must not be empty"
        if prompt == 0:
            yield "input_ids must not be empty"
            return
        low, high = int(asked.input_ids.min()), int(asked.input_ids.max())
        if low < 0 or high >= limits.vocab_size:
            bad = low if low < 0 else high
            at = int(np.flatnonzero(asked.input_ids == bad)[0])
            yield (
                f"input_ids[{at}] is {bad}; the model's vocabulary has ids 0 to "
                f"{limits.vocab_size - 1}"
            )
        if prompt >= limits.context_tokens:
            yield (
                f"the prompt has {prompt} tokens, but the context holds {limits.context_tokens} "
                "and must leave room for one token of the answer"
            )
        if prompt >= limits.pool_tokens:
            yield (
                f"the prompt has {prompt} tokens, but the KV pool holds {limits.pool_tokens} "
                "and must leave room for one token of the answer; "
                "a larger --kv-cache-size or --max-total-tokens would hold it"
            )
        if asked.grammar is not None and not limits.grammars:
            yield "this engine holds answers to no grammars; --grammar-backend names a library"
        if asked.grammar is not None and asked.min_new_tokens > 0:
            yield "min_new_tokens beside a grammar is not supported; the grammar decides the end"
        for call in asked.processors:
            if call.name not in limits.processors:
                loaded = ", ".join(sorted(limits.processors)) or "none"
                yield f"logits processor {quoted(call.name)} is not loaded here; {loaded} is"
        yield from _length_faults(asked)
        yield from _logprob_faults(asked, limits.vocab_size)
        yield from _sampling_faults(asked.sampling, limits.vocab_size)
        yield from _id_faults(asked.sampling, limits.vocab_size)


def _length_faults(asked: GenerateRequest) -> Iterator[str]:
    longest = asked.max_new_tokens
    if longest is not None and longest < 1:
        yield f"max_new_tokens is {longest}; it must be at least 1"
    if asked.min_new_tokens < 0:
        yield f"min_new_tokens is {asked.min_new_tokens}; it must not be negative"
    if longest is not None and asked.min_new_tokens > longest:
        yield f"min_new_tokens ({asked.min_new_tokens}) is above max_new_tokens ({longest})"


def _logprob_faults(asked: GenerateRequest, vocab_size: int) -> Iterator[str]:
    if not 0 <= asked.top_logprobs <= MAX_TOP_LOGPROBS:
        yield f"top_logprobs is {asked.top_logprobs}; it must be from 0 to {MAX_TOP_LOGPROBS}"
    if len(asked.logprob_ids) > MAX_LOGPROB_IDS:
        yield f"token_ids_logprob has {len(asked.logprob_ids)} ids; {MAX_LOGPROB_IDS} are allowed"
    yield from _strangers("token_ids_logprob", asked.logprob_ids, vocab_size)
    if not -1 <= asked.prompt_logprobs_from < len(asked.input_ids):
        yield (
            f"logprob_start_len is {asked.prompt_logprobs_from}; it must be -1, or a place in the "
            f"prompt of {len(asked.input_ids)} tokens"
        )


def _id_faults(sampling: Sampling, vocab_size: int) -> Iterator[str]:
    yield from _strangers("allowed_ids", sampling.allowed_ids, vocab_size)
    for word in sampling.bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            yield (
                f"bad_words has one of {len(word)} tokens; from 1 to {MAX_BAD_WORD_TOKENS} are "
                "allowed"
            )
        yield from _strangers("bad_words", word, vocab_size)


def _strangers(name: str, ids: Iterable[int], vocab_size: int) -> Iterator[str]:
    for id_ in ids:
        if not 0 <= id_ < vocab_size:
            yield f"{name} names id {id_}; the model's vocabulary has ids 0 to {vocab_size - 1}"


def _most_cached(asked: GenerateRequest) -> int:
    """Return how much of the prompt may come from the cache, whose pages tell nothing."""
    if asked.pooling is Pooling.MEAN:
        return 0
    return _NO_CAP if asked.prompt_logprobs_from < 0 else asked.prompt_logprobs_from


def _prompt_is_read(asked: GenerateRequest) -> bool:
    """Whether the data plane needs to know the prompt, beside feeding it to the model."""
    return (
        asked.sampling.repetition_penalty != 1
        or any(len(word) > 1 for word in asked.sampling.bad_words)
        or asked.prompt_logprobs_from >= 0
        or bool(asked.processors)
    )


def _sampling_faults(sampling: Sampling, vocab_size: int) -> Iterator[str]:
    # Each test is written so that a NaN fails it.
    if not 0.0 <= sampling.temperature < float("inf"):
        yield f"temperature is {sampling.temperature}; it must be finite and not negative"
    if not 0.0 < sampling.top_p <= 1.0:
        yield f"top_p is {sampling.top_p}; it must be above 0 and at most 1"
    if not 0.0 < sampling.typical_p <= 1.0:
        yield f"typical_p is {sampling.typical_p}; it must be above 0 and at most 1"
    if not 0.0 <= sampling.min_p <= 1.0:
        yield f"min_p is {sampling.min_p}; it must be from 0 to 1"
    if sampling.top_k < 1:
        yield f"top_k is {sampling.top_k}; it must be at least 1"
    for name in ("frequency_penalty", "presence_penalty"):
        penalty = getattr(sampling, name)
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            yield f"{name} is {penalty}; it must be from -2 to 2"
    if not 0.0 < sampling.repetition_penalty <= MAX_PENALTY:
        yield (
            f"repetition_penalty is {sampling.repetition_penalty}; it must be above 0 and at most 2"
        )
    yield from _strangers("logit_bias", sampling.logit_bias, vocab_size)
    for token, bias in sampling.logit_bias.items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            yield f"logit_bias of id {token} is {bias}; it must be from -100 to 100"
