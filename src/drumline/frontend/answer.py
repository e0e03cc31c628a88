"""One answer: what is asked of it, its text so far, and the pieces that it grows by.

Deltas of tokens become text, which ends at a stop string, and log probabilities. It does not
know where the deltas come from, nor who reads the pieces.
"""

from collections.abc import Sequence

from msgspec import Struct

from drumline.client.stream import Delta
from drumline.core.errors import RequestError
from drumline.frontend.logprobs import TokenLogprob, of_answer, of_prompt
from drumline.frontend.text.detokenizer import Detokenizer
from drumline.frontend.text.stop_strings import StopStrings
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.wire.sampling import SamplingParams

_CLIENT_ERRORS = range(400, 500)
_UNAVAILABLE = 503


class Asked(Struct, frozen=True, kw_only=True):
    """What a request asks for, checked: every prompt is answered `choices` times."""

    prompts: tuple[list[int], ...]
    answer_tokens: int | None
    """How long an answer may be; None for as long as fits, for which nothing is set aside."""
    choices: int
    sampling: SamplingParams
    seed: int | None = None
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    """Whether the stop string that matched is part of the answer."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report at each place; None for none at all."""
    prompt_logprobs: int | None = None
    """As many beside each of the prompt's tokens; None for none at all."""
    logprob_ids: tuple[int, ...] = ()
    """Tokens to report at each of these places besides, however likely."""
    shown: frozenset[int] = frozenset()
    """Special tokens whose text is part of the answer all the same."""
    data_parallel_rank: int | None = None
    """The engine that is to answer, whatever the others have to do."""
    each: "tuple[Asked, ...]" = ()
    """What is asked of each prompt, where that differs; of each as many answers."""

    def of(self, prompt: int) -> "Asked":
        """Return what is asked of a prompt."""
        return self.each[prompt] if self.each else self


class Piece(Struct, frozen=True):
    """What an answer grew by. With a finish reason, it is the answer's last."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or token that matched, or why the engine gave the answer up."""
    token_ids: Sequence[int] = ()
    """The tokens it grew by; their text may come in a later piece."""
    cached_tokens: int = 0
    """How many of the prompt's tokens were in the prefix cache."""
    prompt: tuple[TokenLogprob | None, ...] | None = None
    """What was asked of the prompt's tokens, once, with the first answer to it."""
    weight_version: str = ""
    """With a finish reason: what the weights are called that it was computed with."""


class Answer:
    """One answer's text so far."""

    __slots__ = (
        "_detokenizer",
        "_ends",
        "_keeps_stop",
        "_logprobs",
        "_named",
        "_plain",
        "_prompt_top",
        "_stop_ids",
        "_stops",
        "_unstopped",
        "began_us",
        "cached_tokens",
        "ended",
        "first_token_us",
        "index",
        "last_token_us",
        "prompt",
        "token_ids",
    )

    def __init__(self, index: int, asked: Asked, tokenizer: Tokenizer, began_us: int) -> None:
        """Begin the answer number `index` to a request."""
        sampling = asked.sampling
        self.index = index
        self.began_us = began_us
        self.first_token_us = began_us
        self.last_token_us = began_us
        self.token_ids: list[int] = []
        self.cached_tokens = 0
        self.ended = False
        self._detokenizer = Detokenizer(
            tokenizer, skip_special=sampling.skip_special_tokens, shown=asked.shown
        )
        self._stops = StopStrings(asked.stops) if asked.stops else None
        self._keeps_stop = asked.keeps_stop
        self.prompt: tuple[TokenLogprob | None, ...] | None = None
        self._logprobs = asked.logprobs
        self._prompt_top = asked.prompt_logprobs
        self._named = len(asked.logprob_ids)
        self._plain = not asked.stops and asked.logprobs is None and asked.prompt_logprobs is None
        """Whether nothing but text is told of a token, and none of it is held back."""
        self._stop_ids = sampling.stop_token_ids or set()
        eos = () if sampling.ignore_eos else tokenizer.facts.eos_ids
        self._ends = self._stop_ids.union(eos)
        self._unstopped = sampling.min_new_tokens

    @property
    def tokens(self) -> int:
        """How many it has so far, those of text that is held back included."""
        return len(self.token_ids)

    def add(self, delta: Delta) -> Piece:
        """Return what `delta` adds. Raises RequestError where the engine gave the answer up."""
        ids = delta.token_ids
        reason = delta.finished_reason
        if self._plain and not reason:  # what most tokens are
            self.token_ids += ids
            text = self._detokenizer.add(ids)
            return Piece(self.index, text, token_ids=ids, cached_tokens=delta.cached_tokens)
        stop_reason: str | int | None = None
        spoken = len(ids)
        if reason == "stop" and ids and ids[-1] in self._ends:
            spoken -= 1  # the token that ended it is no text
            if ids[-1] in self._stop_ids:
                stop_reason = ids[-1]
        if self._stops is None:
            text = self._detokenizer.add(ids[:spoken])
            taken = len(ids)
        else:
            text, taken = self._until_stop(self._stops, ids[:spoken])
            if self._stops.matched is not None:
                return self._finished(text, taken, delta, "stop", self._stops.matched)
            taken = len(ids)
        if not reason:
            return self._piece(text, taken, delta)
        rest = self._detokenizer.finish()
        if self._stops is not None:
            rest = self._stops.add(rest)
            if self._stops.matched is not None:
                return self._finished(text + rest, taken, delta, "stop", self._stops.matched)
            rest += self._stops.finish()
        if reason == "abort":
            stop_reason = given_up(delta)
        return self._finished(text + rest, taken, delta, reason, stop_reason)

    def _until_stop(self, stops: StopStrings, ids: Sequence[int]) -> tuple[str, int]:
        # Token by token: what was generated behind a match does not count.
        text = ""
        for position, token_id in enumerate(ids):
            new = self._detokenizer.add((token_id,))
            if self.tokens + position + 1 < self._unstopped:
                text += new  # nothing may end an answer that is shorter than it must be
                continue
            text += stops.add(new)
            if stops.matched is not None:
                return text, position + 1
        return text, len(ids)

    def _finished(
        self, text: str, taken: int, delta: Delta, reason: str, stop_reason: str | int | None
    ) -> Piece:
        self.ended = True
        if self._keeps_stop and isinstance(stop_reason, str) and reason == "stop":
            text += stop_reason
        return self._piece(text, taken, delta, reason, stop_reason)

    def _piece(
        self,
        text: str,
        taken: int,
        delta: Delta,
        reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> Piece:
        ids = delta.token_ids[:taken]
        self.token_ids += ids
        told = None
        if self._prompt_top is not None and delta.input_logprobs:
            told = self.prompt = of_prompt(delta, self._prompt_top, self._named)
        return Piece(
            self.index,
            text,
            of_answer(delta, taken, self._logprobs, self._named),
            reason,
            stop_reason,
            ids,
            delta.cached_tokens,
            told,
        )


def given_up(delta: Delta) -> str:
    """Return why the engine ended an answer before its time.

    Raises RequestError where it blames the request or itself, with the status it names.
    """
    details = delta.details or {}
    message = str(details.get("message") or "the engine gave the request up")
    status = details.get("status_code")
    if isinstance(status, int) and status:
        known = status in _CLIENT_ERRORS or status == _UNAVAILABLE
        raise RequestError(status if known else 500, message, code="engine_refused")
    if "err_type" in details:
        raise RequestError(500, message, code="engine_failed")
    return message
