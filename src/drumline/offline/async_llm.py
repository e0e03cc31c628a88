"""`AsyncLLM`: an engine owned by a Python program, on its event loop."""

import contextlib
import operator
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from msgspec import Struct
from msgspec.structs import replace

from drumline.core.errors import PeerError, RequestError
from drumline.core.ids import request_id
from drumline.frontend.generation import Generation
from drumline.frontend.logprobs import TokenLogprob
from drumline.frontend.openai.calls import asked_of, encoded
from drumline.frontend.openai.sampling import answer_length
from drumline.frontend.service import Service
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.launcher.engine import Engine
from drumline.launcher.rank_process import Ahead
from drumline.offline.options import config_of
from drumline.offline.outputs import CompletionOutput, Logprob, RequestOutput
from drumline.offline.sampling import SamplingParams, fields_of, logprob_counts

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
OnStep = Callable[[str], None]


class _Running(Struct, frozen=True):
    """What there is only while the engine runs."""

    engine: Engine
    service: Service


class AsyncLLM:
    """An engine and its text, for asyncio.

        async with AsyncLLM("path/to/model", max_model_len=2048) as llm:
            async for output in llm.generate("Once upon a time"):
                print(output.outputs[0].text)

    Options are the fields of the configuration, as keyword arguments. The engine ends
    with the thread that started it.

    Thread: everything belongs to the event loop that `start` ran on.
    """

    def __init__(
        self, model: str | None = None, *, ahead: Ahead | None = None, **options: Any
    ) -> None:
        """Prepare to serve `model`; start nothing. Raises ConfigError naming an option.

        The engine's process may have been started `ahead`, on the thread that `start` runs on or
        one that outlives it.
        """
        self._ahead = ahead
        self._config = config_of(model, options)
        self._running: _Running | None = None

    async def start(self, on_step: OnStep | None = None) -> None:
        """Start the engine and wait until it serves; `on_step` is told what it is at.

        Raises ConfigError for what the caller can mend, PeerError when it fails.
        """
        if self._running is not None:
            return
        engine = Engine(
            self._config,
            quiet=True,
            on_step=on_step and (lambda _, step: on_step(step)),
            ahead=self._ahead,
        )
        try:
            self._running = _Running(engine, await engine.service())
        except BaseException:
            await engine.stop()
            raise

    async def close(self) -> None:
        """Stop the engine; does nothing the second time."""
        running, self._running = self._running, None
        if running is not None:
            running.service.close()
            await running.engine.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def model(self) -> str:
        """The name of the model that is served."""
        return self._open.service.model

    @property
    def embedded(self) -> bool:
        """Whether that is the embedded model, for want of another."""
        return self._open.engine.files.embedded

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answers to a text, or to token ids, as they grow.

        Each output holds everything so far. Leaving early aborts the request. Raises
        RequestError for what cannot be asked, PeerError when the engine is gone.
        """
        text: str | None = None
        if isinstance(prompt, str):
            text = prompt
            ids = await encoded(self._open.service, text, add_special=True, param="prompt")
        else:
            ids = _ids(prompt)
        async with contextlib.aclosing(self._outputs(text, ids, sampling_params)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answers to a conversation as they grow; see `generate`."""
        service = self._open.service
        if service.template is None:
            raise RequestError(400, "the model has no chat template; use generate")
        if not messages:
            raise RequestError(400, "there is no message", param="messages")
        text = service.template.render(messages)
        ids = await encoded(service, text, add_special=False, param="messages")
        async with contextlib.aclosing(self._outputs(text, ids, sampling_params)) as outputs:
            async for output in outputs:
                yield output

    async def _outputs(
        self, text: str | None, ids: list[int], params: SamplingParams | None
    ) -> AsyncGenerator[RequestOutput, None]:
        service = self._open.service
        params = params or SamplingParams()
        service.limits.check_ids(ids, "prompt")
        in_answer, in_prompt = logprob_counts(params)
        asked = asked_of(
            service,
            fields_of(params),
            [ids],
            param="prompt",
            max_param="max_tokens",
            max_tokens=answer_length("max_tokens", params.max_tokens),
            logprobs=in_answer,
        )
        asked = replace(asked, prompt_logprobs=in_prompt)
        rid = request_id("llm")
        generation = Generation(
            asked, rid, service.engine, service.tokenizer, service.metrics, service.clock
        )
        answers = [CompletionOutput(index=index) for index in range(asked.choices)]
        prompt_told: list[dict[int, Logprob] | None] | None = None
        running = asked.choices
        async with contextlib.aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                answer = answers[piece.index]
                answer.text += piece.text
                if prompt_told is None and in_prompt is not None:
                    prompt_told = _prompt_told(generation, service.tokenizer)
                if in_answer is not None:
                    _tell(answer, piece.logprobs, service.tokenizer)
                answer.finish_reason = piece.finish_reason
                answer.stop_reason = piece.stop_reason
                running -= piece.finish_reason is not None
                yield RequestOutput(
                    request_id=rid,
                    prompt=text,
                    prompt_token_ids=ids,
                    prompt_logprobs=prompt_told,
                    outputs=[
                        replace(
                            answer,
                            token_ids=generation.token_ids(answer.index),
                            logprobs=answer.logprobs and list(answer.logprobs),
                        )
                        for answer in answers
                    ],
                    finished=not running,
                    num_cached_tokens=generation.usage.cached_tokens,
                )

    @property
    def _open(self) -> _Running:
        if self._running is None:
            raise PeerError("the engine is not running; use `async with`, or call start() first")
        return self._running


def _tell(answer: CompletionOutput, told: Sequence[TokenLogprob], tokenizer: Tokenizer) -> None:
    """Grow an answer's log probabilities by those of its new tokens."""
    answer.logprobs = (answer.logprobs or []) + [_by_id(one, tokenizer) for one in told]
    answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + sum(
        one.logprob for one in told
    )


def _prompt_told(
    generation: Generation, tokenizer: Tokenizer
) -> list[dict[int, Logprob] | None] | None:
    told = generation.prompt_logprobs(0)
    if told is None:
        return None
    return [None if one is None else _by_id(one, tokenizer) for one in told]


def _by_id(told: TokenLogprob, tokenizer: Tokenizer) -> dict[int, Logprob]:
    def one(token_id: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, tokenizer.piece(token_id).decode(errors="replace"))

    found = {
        token_id: one(token_id, value, rank) for rank, (token_id, value) in enumerate(told.top, 1)
    }
    if told.token_id not in found:
        found = {told.token_id: one(told.token_id, told.logprob, None), **found}
    return found


def _ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token_id) for token_id in prompt]
    except TypeError:
        raise RequestError(
            400, f"a prompt is a text or a list of token ids, not {prompt!r:.80}", param="prompt"
        ) from None
