"""A request on its way through a rank: as it arrived, and as the data plane learns it."""

from enum import StrEnum
from typing import Any

from msgspec import Struct

from drumline.contract.arrays import NO_INTS, IntArray
from drumline.contract.grammar import GrammarKey

TOP_K_OFF = 1 << 30
"""The `top_k` that keeps the whole vocabulary."""

MAX_BAD_WORD_TOKENS = 32
"""Tokens of the longest sequence that may be forbidden: as many are remembered of a request."""


class Sampling(Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Normalized: greedy is `top_k == 1` with temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_OFF
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    typical_p: float = 1.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that never stand in the answer, nor across its beginning."""
    allowed_ids: tuple[int, ...] = ()
    """The only ids that may be drawn; none named, all are."""
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.top_k == 1


class ProcessorCall(Struct, frozen=True):
    """A registered logits processor that a request asks for, and what it hands it."""

    name: str
    params: Any = None
    """Whatever JSON holds; the processor's to read."""


class Pooling(StrEnum):
    """How what the last layer makes of a prompt's tokens becomes one vector."""

    MEAN = "mean"
    LAST = "last"


class GenerateRequest(Struct, frozen=True, kw_only=True, eq=False):
    """A generate request as the frontend's link decoded it; not yet checked against the engine.

    `page_digests` are the 32-byte prefix digests of the prompt's full pages,
    computed where the request was decoded so that the round does not hash.
    """

    rid: str
    input_ids: IntArray = NO_INTS
    sampling: Sampling = Sampling()
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    return_logprob: bool = False
    top_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()
    """Ids whose log probabilities are told at each place, behind those of the likeliest."""
    prompt_logprobs_from: int = -1
    """The first prompt position that the log probabilities of the prompt are told from; -1: of
    none."""
    pooling: Pooling | None = None
    """How the prompt becomes a vector, for a request that asks for one."""
    page_digests: bytes = b""
    cache_salt: str = ""
    """Requests share cached prefixes only with those of the same salt."""
    priority: int = 0
    """Higher is admitted first, where the engine's policy asks for it."""
    deadline_us: int = 0
    """How long after its arrival the request ends at the latest; 0: whenever it is done."""
    processors: tuple[ProcessorCall, ...] = ()
    grammar: GrammarKey | None = None
    invalid: str | None = None
    """Why the link could not make sense of it; such a request is only answered."""


class Admission(Struct, frozen=True, kw_only=True, eq=False):
    """What the data plane keeps of a request, from before its first forward to its release."""

    rid: str
    prompt_tokens: int
    prompt_ids: IntArray = NO_INTS
    """The prompt, where something reads it: a repetition penalty, a bad word of several tokens,
    log probabilities of the prompt, a logits processor."""
    sampling: Sampling
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end this request, eos included unless ignored; masked until `min_new_tokens`."""
    logprob_ids: tuple[int, ...] = ()
    prompt_logprobs_from: int = -1
    pooling: Pooling | None = None
    processors: tuple[ProcessorCall, ...] = ()
