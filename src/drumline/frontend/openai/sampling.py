"""Checking what a request says about sampling, and bringing it into the wire's form."""

from typing import Any

from drumline.core.errors import RequestError
from drumline.frontend.limits import MAX_CHOICES, Limits
from drumline.frontend.openai.grammar import grammar_params
from drumline.frontend.openai.parameters import unsupported
from drumline.frontend.openai.schema import SamplingFields
from drumline.wire.own_params import MOST_URGENT, NAME
from drumline.wire.sampling import SamplingParams

MAX_STOPS = 16
MAX_LOGPROBS = 20

_SEEDS = 1 << 63
_OPEN_ZERO = 1e-9
_MOST_TOKENS = (1 << 31) - 1
_LONGEST_ID = 20
"""Digits; int() refuses thousands of them, and no vocabulary needs more than these."""


def sampling_params(fields: SamplingFields, limits: Limits) -> SamplingParams:
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
        _check("top_k", top_k, 1, None)
        top_k = min(top_k, limits.vocabulary)
    return SamplingParams(
        stop_token_ids=set(stop_ids) or None,
        temperature=_or("temperature", fields.temperature, 1.0, 0.0, 2.0),
        top_p=_or("top_p", fields.top_p, 1.0, _OPEN_ZERO, 1.0),
        top_k=top_k,
        min_p=_or("min_p", fields.min_p, 0.0, 0.0, 1.0),
        frequency_penalty=_or("frequency_penalty", fields.frequency_penalty, 0.0, -2.0, 2.0),
        presence_penalty=_or("presence_penalty", fields.presence_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=_or(
            "repetition_penalty", fields.repetition_penalty, 1.0, _OPEN_ZERO, 2.0
        ),
        min_new_tokens=int(_or("min_tokens", fields.min_tokens, 0, 0, _MOST_TOKENS)),
        ignore_eos=ignore_eos,
        skip_special_tokens=fields.skip_special_tokens is not False,
        logit_bias=_logit_bias(fields.logit_bias, limits),
        **_with_priority(grammar_params(fields), fields.priority),
    )


def _with_priority(params: dict[str, Any], priority: int | None) -> dict[str, Any]:
    """Add a priority to what travels beside the wire's own places."""
    if not priority:
        return params
    _check("priority", priority, -MOST_URGENT, MOST_URGENT)
    own = (params.get("custom_params") or {}).get(NAME, {})
    return {**params, "custom_params": {NAME: {**own, "priority": priority}}}


def choice_count(fields: SamplingFields) -> int:
    """Return how many answers each prompt gets. Raises RequestError 400 out of range."""
    count = 1 if fields.n is None else fields.n
    _check("n", count, 1, MAX_CHOICES)
    if fields.best_of is not None and fields.best_of != count:
        raise unsupported("best_of", "answers are not ranked; leave it out or set it to n")
    return count


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
        _check(name, value, 1, _MOST_TOKENS)
    return value


def logprob_count(name: str, value: int) -> int:
    """Return how many of the likeliest tokens to report. Raises RequestError 400 out of range."""
    _check(name, value, 0, MAX_LOGPROBS)
    return value


def _or(name: str, value: float | None, default: float, least: float, most: float | None) -> Any:
    if value is None:
        return default
    _check(name, value, least, most)
    return value


def _check(name: str, value: float, least: float, most: float | None) -> None:
    if value >= least and (most is None or value <= most):
        return
    kind = "integer" if isinstance(least, int) else "decimal"
    low = "above 0" if least == _OPEN_ZERO else f"at least {least}"
    bounds = low if most is None else f"{low} and at most {most}"
    said = f"{value}" if abs(value) < _MOST_TOKENS else "too large a number"
    side = "below_min" if value < least else "above_max"
    raise RequestError(
        400, f"{name} is {said}; it must be {bounds}", param=name, code=f"{kind}_{side}_value"
    )


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
        _check(name, value, -100.0, 100.0)
    return {str(int(key)): value for key, value in bias.items()}
