"""Checking what a request says about sampling, and bringing it into the wire's form."""

from typing import Any

from drumline.core.errors import RequestError
from drumline.frontend.limits import MAX_CHOICES, Limits
from drumline.frontend.openai.bounds import MOST_TOKENS, OPEN_ZERO, check
from drumline.frontend.openai.grammar import grammar_params
from drumline.frontend.openai.own import with_own
from drumline.frontend.openai.parameters import unsupported
from drumline.frontend.openai.schema import SamplingFields
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.wire.sampling import SamplingParams

MAX_STOPS = 16
MAX_LOGPROBS = 20

_SEEDS = 1 << 63
_LONGEST_ID = 20
"""Digits; int() refuses thousands of them, and no vocabulary needs more than these."""


def sampling_params(fields: SamplingFields, limits: Limits, tokenizer: Tokenizer) -> SamplingParams:
    """Return the wire's parameters, all but the seed and the answer's length.

    Stop strings are not among them: they are matched on text, on this side.
    Raises RequestError 400 naming the parameter that is out of its range.
    """
    ignore_eos = bool(fields.ignore_eos)
    stop_ids = fields.stop_token_ids or []
    limits.check_ids(stop_ids, "stop_token_ids")
    top_k = -1 if fields.top_k in (None, 0) else fields.top_k
    assert top_k is not None
    if top_k != -1:
        check("top_k", top_k, 1, None)
        top_k = min(top_k, limits.vocabulary)
    return SamplingParams(
        stop_token_ids=set(stop_ids) or None,
        temperature=_or("temperature", fields.temperature, 1.0, 0.0, 2.0),
        top_p=_or("top_p", fields.top_p, 1.0, OPEN_ZERO, 1.0),
        top_k=top_k,
        min_p=_or("min_p", fields.min_p, 0.0, 0.0, 1.0),
        frequency_penalty=_or("frequency_penalty", fields.frequency_penalty, 0.0, -2.0, 2.0),
        presence_penalty=_or("presence_penalty", fields.presence_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=_or(
            "repetition_penalty", fields.repetition_penalty, 1.0, OPEN_ZERO, 2.0
        ),
        min_new_tokens=int(_or("min_tokens", fields.min_tokens, 0, 0, MOST_TOKENS)),
        ignore_eos=ignore_eos,
        skip_special_tokens=fields.skip_special_tokens is not False,
        logit_bias=_logit_bias(fields.logit_bias, limits),
        **with_own(grammar_params(fields), fields, limits, tokenizer),
    )


def choice_count(fields: SamplingFields) -> int:
    """Return how many answers each prompt gets. Raises RequestError 400 out of range."""
    count = _n(fields)
    if fields.best_of is not None and fields.best_of != count:
        raise unsupported("best_of", "answers are not ranked here; leave it out or set it to n")
    return count


def _n(fields: SamplingFields) -> int:
    count = 1 if fields.n is None else fields.n
    check("n", count, 1, MAX_CHOICES)
    return count


def generated_count(fields: SamplingFields) -> int:
    """Return how many answers are generated for each prompt, of which the best `n` are given.

    Raises RequestError 400 out of range, and for a stream, which cannot wait for the best.
    """
    count = _n(fields)
    if fields.best_of is None or fields.best_of == count:
        return count
    check("best_of", fields.best_of, count, MAX_CHOICES)
    if fields.stream:
        raise unsupported("best_of", "a stream cannot tell which answers are best; set it to n")
    return fields.best_of


def seed_of(fields: SamplingFields, default: int | None) -> int | None:
    """Return the seed of the first answer, brought into the range engines take."""
    seed = default if fields.seed is None else fields.seed
    return None if seed is None else seed % _SEEDS


def stop_strings(fields: SamplingFields) -> tuple[str, ...]:
    """Return the strings that end an answer. Raises RequestError 400 for empty or too many."""
    stop = fields.stop
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise RequestError(
            400,
            f"stop has {len(stops)} strings; {MAX_STOPS} are allowed",
            param="stop",
            code="array_above_max_length",
        )
    if "" in stops:
        raise RequestError(
            400, "stop holds an empty string, which ends nothing", param="stop", code="empty_string"
        )
    return stops


def answer_length(name: str, value: int | None) -> int | None:
    """Return the answer's length that was asked for. Raises RequestError 400 below one."""
    if value is not None:
        check(name, value, 1, MOST_TOKENS)
    return value


def logprob_count(name: str, value: int) -> int:
    """Return how many of the likeliest tokens to report. Raises RequestError 400 out of range."""
    check(name, value, 0, MAX_LOGPROBS)
    return value


def prompt_logprob_count(fields: SamplingFields) -> int | None:
    """Return how many of the likeliest tokens to report at each place of a prompt.

    Raises RequestError 400 out of range, and for a stream, which has no place for them.
    """
    asked = fields.prompt_logprobs
    if asked is None:
        return None
    if fields.stream:
        raise unsupported("prompt_logprobs", "a stream has no place for them; leave stream out")
    return logprob_count("prompt_logprobs", asked)


def _or(name: str, value: float | None, default: float, least: float, most: float | None) -> Any:
    if value is None:
        return default
    check(name, value, least, most)
    return value


def _logit_bias(bias: dict[str, float] | None, limits: Limits) -> dict[str, float] | None:
    if not bias:
        return None
    for key, value in bias.items():
        name = f"logit_bias.{key[: 2 * _LONGEST_ID]}"
        if not (key.isascii() and key.isdecimal() and len(key) <= _LONGEST_ID):
            raise RequestError(
                400, f"{name}: the key is no token id", param="logit_bias", code="invalid_token_id"
            )
        limits.check_ids([int(key)], "logit_bias")
        check(name, value, -100.0, 100.0)
    return {str(int(key)): value for key, value in bias.items()}
