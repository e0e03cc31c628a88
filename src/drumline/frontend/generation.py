"""Generating the answers of one request: submitting, decoding, stopping, accounting.

It turns the engine's deltas into pieces of text, for as many answers as were asked
for, and aborts what is still running when whoever reads the pieces leaves. It does
not know in which dialect they are sent.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import Struct
from msgspec.structs import replace

from drumline.client.stream import Delta, Stream
from drumline.core.clock import SystemClock
from drumline.core.errors import DrumlineError, RequestError
from drumline.frontend.engine_link import EngineLink
from drumline.frontend.logprobs import TokenLogprob, of_answer, of_prompt
from drumline.frontend.text.detokenizer import Detokenizer
from drumline.frontend.text.stop_strings import StopStrings
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.metrics.requests import RequestMetrics, RequestOutcome
from drumline.wire.output import NUMERICAL_ERROR
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams, normalized

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


class Usage(Struct):
    """What a request cost, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Generation:
    """The answers to one request. Its pieces are read once, by one reader."""

    def __init__(
        self,
        asked: Asked,
        rid: str,
        engine: EngineLink,
        tokenizer: Tokenizer,
        metrics: RequestMetrics,
        clock: SystemClock,
    ) -> None:
        """Prepare to generate; `rid` must not have been used before."""
        self.asked = asked
        self.usage = Usage(prompt_tokens=sum(map(len, asked.prompts)))
        self._rid = rid
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        began = clock.now_us()
        self._answers = [
            _Answer(index, asked.of(index // asked.choices), tokenizer, began)
            for index in range(len(asked.prompts) * asked.choices)
        ]
        self._streams: list[Stream] = []
        self._aborted = [False] * len(self._answers)

    @property
    def answers(self) -> int:
        """How many answers there will be."""
        return len(self._answers)

    def abort(self, index: int | None = None) -> int:
        """Have the engine end an answer, or all; returns how many were still growing.

        Whoever reads the pieces is told with the finish reason `abort`.
        """
        ended = 0
        for each in range(self.answers) if index is None else (index,):
            if not self._aborted[each] and not self._answers[each].ended:
                self._aborted[each] = True
                ended += 1
                if each < len(self._streams):
                    self._engine.cancel(self._streams[each])
        return ended

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of all answers as they come, each answer's in order.

        Leaving early aborts what runs. Raises RequestError where the engine refuses or
        breaks off an answer, PeerError when it is gone.
        """
        streams = self._streams
        ended_by = "error"
        try:
            # Grows as it goes: what was submitted before one that fails is aborted below.
            streams.extend(
                self._engine.submit(self._request(index)) for index in range(self.answers)
            )
            for index, stream in enumerate(streams):
                if self._aborted[index]:  # before it had begun
                    self._engine.cancel(stream)
            if len(streams) == 1:  # most are, and the way of their tokens is the shortest
                async for delta in streams[0]:
                    piece = self._heard(0, delta)
                    if piece is not None:
                        yield piece
                return
            async with aclosing(_interleaved(streams)) as deltas:
                async for index, delta in deltas:
                    piece = self._heard(index, delta)
                    if piece is not None:
                        yield piece
        except (GeneratorExit, asyncio.CancelledError):
            ended_by = "disconnect"
            raise
        finally:
            for stream in streams:
                stream.abort()
            for answer in self._answers:
                if not answer.ended:
                    self._record(answer, ended_by)

    def token_ids(self, index: int) -> list[int]:
        """Return the ids of an answer so far, those of text that is held back included."""
        return list(self._answers[index].token_ids)

    def prompt_logprobs(self, prompt: int) -> tuple[TokenLogprob | None, ...] | None:
        """Return what was told of a prompt's tokens, the first None; None until it is told."""
        return self._answers[prompt * self.asked.choices].prompt

    def _request(self, index: int) -> TokenizedGenerateReqInput:
        prompt, choice = divmod(index, self.asked.choices)
        asked = self.asked.of(prompt)
        # A prompt is told of once for all its answers.
        told = choice == 0 and asked.prompt_logprobs is not None
        sampling = normalized(
            replace(
                asked.sampling,
                max_new_tokens=asked.answer_tokens,
                seed=None if asked.seed is None else asked.seed + choice,
            )
        )
        return TokenizedGenerateReqInput(
            rid=self._rid if len(self._answers) == 1 else f"{self._rid}-{index}",
            input_ids=self.asked.prompts[prompt],
            sampling_params=sampling,
            return_logprob=asked.logprobs is not None or told,
            logprob_start_len=0 if told else -1,
            top_logprobs_num=max(asked.logprobs or 0, (told and asked.prompt_logprobs) or 0),
            token_ids_logprob=list(asked.logprob_ids) or None,
            stream=True,
            created_time=self._clock.wall_s(),
            data_parallel_rank=asked.data_parallel_rank,
        )

    def _heard(self, index: int, delta: Delta) -> Piece | None:
        """Return what an answer grew by; None for nothing at all."""
        answer = self._answers[index]
        now = self._clock.now_us()
        before = len(answer.token_ids)
        if delta.details is not None and delta.details.get("err_type") == NUMERICAL_ERROR:
            self._metrics.not_finite()
        piece = answer.add(delta)
        grown = len(answer.token_ids) - before
        self.usage.completion_tokens += grown
        if index % self.asked.choices == 0:  # a prompt is computed once for all its answers
            self.usage.cached_tokens += delta.cached_tokens - answer.cached_tokens
        answer.cached_tokens = piece.cached_tokens
        if grown:
            if before == 0:
                self._metrics.first_token((now - answer.began_us) / 1e6)
                answer.first_token_us = now
            else:
                self._metrics.tokens(grown, (now - answer.last_token_us) / 1e6)
            answer.last_token_us = now
        if piece.finish_reason is not None:
            self._record(answer, piece.finish_reason)
            self._streams[index].abort()
            version = delta.weight_version or self._engine.weight_version
            return replace(piece, weight_version=version)
        return piece if grown or piece.text else None

    def _record(self, answer: "_Answer", reason: str) -> None:
        now = self._clock.now_us()
        decoded = answer.last_token_us - answer.first_token_us
        self._metrics.ended(
            RequestOutcome(
                reason=reason,
                prompt_tokens=len(self.asked.prompts[answer.index // self.asked.choices]),
                completion_tokens=answer.tokens,
                cached_tokens=answer.cached_tokens,
                total_s=(now - answer.began_us) / 1e6,
                per_token_s=decoded / 1e6 / (answer.tokens - 1) if answer.tokens > 1 else None,
            )
        )


class _Answer:
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


async def _interleaved(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield the deltas of all streams as they come, each with its stream's index."""
    # Bounded: behind a slow reader the streams themselves merge what piles up.
    queue: asyncio.Queue[tuple[int, Delta | DrumlineError | None]] = asyncio.Queue(len(streams))

    async def forward(index: int, stream: Stream) -> None:
        try:
            async for delta in stream:
                await queue.put((index, delta))
            await queue.put((index, None))
        except DrumlineError as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(forward(index, s)) for index, s in enumerate(streams)]
    try:
        remaining = len(streams)
        while remaining:
            index, item = await queue.get()
            if item is None:
                remaining -= 1
            elif isinstance(item, DrumlineError):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
