"""What requests say that the wire has no place for: one struct, under a name of our own."""

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from drumline.contract.request import MAX_BAD_WORD_TOKENS, Pooling

NAME = "drumline"
"""Under this name in `custom_params`. Engines of others pass it over."""

MOST_URGENT = 1 << 30
MAX_WORDS = 1024
MAX_SALT_CHARACTERS = 1024

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Word = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]


class OwnParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields that are not set mean what an engine does without them."""

    choice: list[str] | None = None
    """The answer is one of these."""
    priority: Annotated[int, Meta(ge=-MOST_URGENT, le=MOST_URGENT)] = 0
    typical_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    bad_words: Annotated[list[Word], Meta(max_length=MAX_WORDS)] = []
    """Sequences of ids that never stand in the answer."""
    allowed_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    """The only ids that the answer is made of."""
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)] = ""
    """Cached prefixes are shared with requests of the same salt alone."""
    deadline_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Seconds from its arrival in which the request is done, or ends."""
    embed: Pooling | None = None
    """The prompt becomes a vector, told in the details of the request's end."""
    logits_processors: dict[str, Any] = {}
    """By name, what each processor that the engine loaded is handed."""

    def __post_init__(self) -> None:
        # A comparison with NaN is false, so bounds let it pass.
        for name in ("typical_p", "deadline_s"):
            value = getattr(self, name)
            if value is not None and math.isnan(value):
                raise ValueError(f"`{name}` is not a number")


def own_params(custom_params: dict[str, Any] | None) -> OwnParams:
    """Return what a request says under our name.

    Raises msgspec.ValidationError naming the field that is unknown or does not fit.
    """
    said = (custom_params or {}).get(NAME)
    return OwnParams() if said is None else msgspec.convert(said, OwnParams)
