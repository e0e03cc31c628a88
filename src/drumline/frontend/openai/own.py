"""What a request says that the wire has no place for, checked: words, ids, salts, priorities."""

from typing import Any

import msgspec

from drumline.contract.request import MAX_BAD_WORD_TOKENS
from drumline.core.errors import RequestError
from drumline.frontend.limits import Limits
from drumline.frontend.openai.bounds import check
from drumline.frontend.openai.schema import SamplingFields
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.wire.own_params import (
    MAX_SALT_CHARACTERS,
    MAX_WORDS,
    MOST_URGENT,
    NAME,
    OwnParams,
)


def with_own(
    params: dict[str, Any], fields: SamplingFields, limits: Limits, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return `params` with what engines of ours find under our name beside the wire's places.

    Raises RequestError 400 naming the parameter that is out of its range.
    """
    own: dict[str, Any] = {}
    if fields.priority:
        check("priority", fields.priority, -MOST_URGENT, MOST_URGENT)
        own["priority"] = fields.priority
    if fields.typical_p is not None:
        check("typical_p", fields.typical_p, 1e-9, 1.0)
        own["typical_p"] = fields.typical_p
    if fields.bad_words:
        own["bad_words"] = _words(fields.bad_words, tokenizer)
    if fields.allowed_token_ids is not None:
        own["allowed_ids"] = _allowed(fields.allowed_token_ids, limits)
    if fields.cache_salt:
        if len(fields.cache_salt) > MAX_SALT_CHARACTERS:
            raise _refused(
                "cache_salt",
                f"{len(fields.cache_salt)} characters; {MAX_SALT_CHARACTERS} are allowed",
                "string_above_max_length",
            )
        own["cache_salt"] = fields.cache_salt
    if fields.logits_processors:
        # Names of what the operator loaded; the engine knows which those are.
        asked = fields.logits_processors
        own["logits_processors"] = asked if isinstance(asked, dict) else dict.fromkeys(asked)
    if not own:
        return params
    before = (params.get("custom_params") or {}).get(NAME, {})
    whole = msgspec.convert({**before, **own}, OwnParams)
    return {**params, "custom_params": {NAME: msgspec.to_builtins(whole)}}


def _words(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of words, each as it begins a text and as it stands within one."""
    if len(words) > MAX_WORDS // 2:
        raise _refused(
            "bad_words", f"{len(words)} words; {MAX_WORDS // 2} are allowed",
            "array_above_max_length",
        )  # fmt: skip
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        name = f"bad_words[{index}]"
        if not word.strip():
            raise _refused(name, "an empty word stands everywhere", "empty_string")
        for spelled in (word, word if word[0].isspace() else f" {word}"):
            try:
                ids = tuple(tokenizer.encode(spelled, add_special=False))
            except TypeError:
                raise _refused(
                    name, "half a surrogate pair is no Unicode", "invalid_text"
                ) from None
            if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                raise _refused(
                    name, f"it has {len(ids)} tokens; from 1 to {MAX_BAD_WORD_TOKENS} are allowed",
                    "string_above_max_length",
                )  # fmt: skip
            sequences[ids] = None
    return [list(ids) for ids in sequences]


def _allowed(ids: list[int], limits: Limits) -> list[int]:
    if not ids:
        raise _refused("allowed_token_ids", "without any, no answer can begin", "empty_array")
    limits.check_ids(ids, "allowed_token_ids")
    return sorted(set(ids))


def _refused(param: str, why: str, code: str) -> RequestError:
    return RequestError(400, f"{param}: {why}", param=param, code=code)
