"""How answers are held to grammars."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from drumline.core.config.fields import Positive, flags


class GrammarBackend(StrEnum):
    """Which library constrains answers to grammars."""

    XGRAMMAR = "xgrammar"
    LLGUIDANCE = "llguidance"
    NONE = "none"


class GrammarConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How answers are held to grammars."""

    grammar_backend: Annotated[
        GrammarBackend,
        Meta(
            description="library that compiles grammars; none refuses requests that have one",
            extra=flags("--guided-decoding-backend"),
        ),
    ] = GrammarBackend.XGRAMMAR
    grammar_compile_timeout: Annotated[
        float,
        Meta(gt=0, description="seconds that compiling one grammar may take"),
    ] = 10.0
    grammar_queue_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds that a grammar may wait for others' compiles; its requests "
            "are refused with status 503 then",
        ),
    ] = 60.0
    grammar_workers: Annotated[
        Positive,
        Meta(description="grammars that are compiled at the same time"),
    ] = 1
    grammar_cache_size: Annotated[
        Positive,
        Meta(description="compiled grammars that are kept for requests to come"),
    ] = 256
