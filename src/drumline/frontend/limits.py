"""How much one request may ask for, from what the engine registered.

Requests over these limits are refused here, with the numbers, so that the engine
never sees them.
"""

from typing import Self

from msgspec import Struct

from drumline.core.errors import RequestError, quoted
from drumline.wire.handshake import Registration

TOO_LONG = "context_length_exceeded"
POOL_TOO_SMALL = "kv_pool_exceeded"

MAX_CHOICES = 128
MAX_SEQUENCES = 1024
MAX_LOGPROB_IDS = 128
"""Tokens whose log probabilities are told by name at each place; engines refuse more."""


class Limits(Struct, frozen=True, kw_only=True):
    """Sizes in tokens. `pool` is what the engine's KV pool holds, if it says so."""

    context: int
    pool: int | None
    vocabulary: int

    @classmethod
    def of(cls, registration: Registration, vocabulary: int) -> Self:
        """Return the limits of a registered engine and a tokenizer's vocabulary."""
        return cls(
            context=registration.max_model_len,
            pool=registration.kv_cache_size_tokens,
            vocabulary=vocabulary,
        )

    @property
    def room(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self.context if self.pool is None else min(self.context, self.pool)

    def answer_tokens(
        self, prompt_tokens: int, asked: int | None, *, param: str, max_param: str
    ) -> int:
        """Return how many tokens an answer may have: `asked`, or as many as fit.

        Raises RequestError 400 naming `param` for a prompt that leaves no room, and
        `max_param` for an answer that does not fit behind it.
        """
        if prompt_tokens >= self.context:
            raise self.prompt_too_long(prompt_tokens, param)
        if self.pool is not None and prompt_tokens >= self.pool:
            raise RequestError(
                400,
                f"the prompt has {prompt_tokens} tokens; the engine's KV pool holds {self.pool} "
                "tokens, the answer's included",
                param=param,
                code=POOL_TOO_SMALL,
            )
        if asked is None:
            return self.room - prompt_tokens
        total = prompt_tokens + asked
        if total > self.context:
            raise RequestError(
                400,
                f"the prompt's {prompt_tokens} tokens and {max_param} {asked} are {total} tokens; "
                f"the model's context holds {self.context}",
                param=max_param,
                code=TOO_LONG,
            )
        if total > self.room:
            raise RequestError(
                400,
                f"the prompt's {prompt_tokens} tokens and {max_param} {asked} are {total} tokens; "
                f"the engine's KV pool holds {self.pool}",
                param=max_param,
                code=POOL_TOO_SMALL,
            )
        return asked

    def prompt_too_long(self, tokens: int, param: str, *, at_least: bool = False) -> RequestError:
        """Return the refusal of a prompt that leaves no room in the context."""
        count = f"at least {tokens}" if at_least else str(tokens)
        return RequestError(
            400,
            f"the prompt has {count} tokens; the model's context holds {self.context} tokens, "
            "the answer's included",
            param=param,
            code=TOO_LONG,
        )

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raise RequestError 400 naming the first id outside the vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocabulary):
            stranger = next(id_ for id_ in ids if not 0 <= id_ < self.vocabulary)
            raise RequestError(
                400,
                f"token id {quoted(stranger)} is outside the vocabulary of "
                f"{self.vocabulary} tokens",
                param=param,
                code="invalid_token_id",
            )
