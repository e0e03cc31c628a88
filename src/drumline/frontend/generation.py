"""Generating the answers of one request: submitting, following, accounting.

It has as many answers grow as were asked for, and aborts what is still running when
whoever reads the pieces leaves. It does not know in which dialect they are sent.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import Struct
from msgspec.structs import replace

from drumline.client.stream import Delta, Stream
from drumline.core.clock import SystemClock
from drumline.core.errors import DrumlineError
from drumline.frontend.answer import Answer, Asked, Piece
from drumline.frontend.engine_link import EngineLink
from drumline.frontend.logprobs import TokenLogprob
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.metrics.requests import RequestMetrics, RequestOutcome
from drumline.wire.output import NUMERICAL_ERROR
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import normalized


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
            Answer(index, asked.of(index // asked.choices), tokenizer, began)
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

    def _record(self, answer: Answer, reason: str) -> None:
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
