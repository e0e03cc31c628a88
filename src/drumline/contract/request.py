"""A request on its way through a rank: as it arrived, and as the data plane learns it."""

from msgspec import Struct

from drumline.contract.arrays import NO_INTS, IntArray
from drumline.contract.grammar import GrammarKey

TOP_K_OFF = 1 << 30
"""The `top_k` that keeps the whole vocabulary."""


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
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.top_k == 1


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
    page_digests: bytes = b""
    priority: int = 0
    """Higher is admitted first, where the engine's policy asks for it."""
    grammar: GrammarKey | None = None
    invalid: str | None = None
    """Why the link could not make sense of it; such a request is only answered."""


class Admission(Struct, frozen=True, kw_only=True, eq=False):
    """What the data plane keeps of a request, from before its first forward to its release."""

    rid: str
    prompt_tokens: int
    prompt_ids: IntArray = NO_INTS
    """The prompt, where the sampling has a repetition penalty, which reads it."""
    sampling: Sampling
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end this request, eos included unless ignored; masked until `min_new_tokens`."""
