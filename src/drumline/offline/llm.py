"""`LLM`: an engine owned by a Python program that knows nothing of event loops."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from drumline.core.errors import PeerError, RequestError
from drumline.launcher.rank_process import Ahead
from drumline.offline.async_llm import AsyncLLM, Messages, OnStep, Prompt
from drumline.offline.outputs import RequestOutput
from drumline.offline.sampling import SamplingParams

T = TypeVar("T")
Params = SamplingParams | Sequence[SamplingParams] | None


_CLOSING_S = 0.01
_CLOSINGS = 1000


class LLM:
    """An engine and its text.

        with LLM("path/to/model", max_model_len=2048) as llm:
            outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))
            print(outputs[0].outputs[0].text)

    Options are the fields of the configuration, as keyword arguments. The engine
    runs until `close`, the end of the `with`, or the program's end.

    Thread: any; calls from several threads run side by side.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        on_step: OnStep | None = None,
        ahead: Ahead | None = None,
        **options: Any,
    ) -> None:
        """Start the engine and wait until it serves; `on_step` is told what it is at.

        Its process may have been started `ahead`, on a thread that outlives the engine.

        Raises ConfigError for what the caller can mend, PeerError when it fails.
        """
        self._llm = AsyncLLM(model, ahead=ahead, **options)
        self._loop = _LoopThread()
        # Not a __del__: this runs at the interpreter's exit too, while threads still do.
        self._close = weakref.finalize(self, _close, self._llm, self._loop)
        try:
            self._loop.run(self._llm.start(on_step))
        except BaseException:
            self._close()
            raise

    @property
    def model(self) -> str:
        """The name of the model that is served."""
        return self._llm.model

    @property
    def embedded(self) -> bool:
        """Whether that is the embedded model, for want of another."""
        return self._llm.embedded

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None
    ) -> list[RequestOutput]:
        """Answer texts or lists of token ids, all at once; return outputs in their order.

        `sampling_params` is one for all, or one a prompt. Raises RequestError for what
        cannot be asked, PeerError when the engine is gone.
        """
        each: list[Prompt] = [prompts] if _is_one(prompts) else list(prompts)  # type: ignore[list-item,arg-type]  # told apart by _is_one
        return self._all(self._llm.generate, each, sampling_params)

    def chat(
        self, messages: Messages | Sequence[Messages], sampling_params: Params = None
    ) -> list[RequestOutput]:
        """Answer a conversation, or several at once; see `generate`."""
        several = bool(messages) and not hasattr(messages[0], "keys")
        each: list[Messages] = list(messages) if several else [messages]  # type: ignore[arg-type,list-item]  # told apart just above
        return self._all(self._llm.chat, each, sampling_params)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield the answer to a conversation as it grows; leaving early aborts it."""
        return self._stream(self._llm.chat(messages, sampling_params))

    def stream_generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield the answer to a text or token ids as it grows; leaving early aborts it."""
        return self._stream(self._llm.generate(prompt, sampling_params))

    def close(self) -> None:
        """Stop the engine; does nothing the second time."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _all(
        self,
        answer: Callable[[T, SamplingParams | None], AsyncGenerator[RequestOutput, None]],
        asked: list[T],
        sampling_params: Params,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params: list[SamplingParams | None] = [sampling_params] * len(asked)
        else:
            params = list(sampling_params)
        if len(params) != len(asked):
            raise RequestError(
                400,
                f"there are {len(params)} sampling_params for {len(asked)} prompts",
                param="sampling_params",
            )

        async def gathered() -> list[RequestOutput]:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_last(answer(one, each)))
                    for one, each in zip(asked, params, strict=True)
                ]
            return [task.result() for task in tasks]

        try:
            return self._loop.run(gathered())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    def _stream(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> Generator[RequestOutput, None, None]:
        try:
            while True:
                try:
                    yield self._loop.run(_next(outputs))
                except StopAsyncIteration:
                    return
        finally:
            # Once the engine was closed, this has ended with it.
            with contextlib.suppress(PeerError):
                self._loop.run(_ended(outputs))


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt: a text, or token ids. Raises RequestError if it is no list."""
    if isinstance(prompts, str):
        return True
    if (
        isinstance(prompts, bytes)
        or not hasattr(prompts, "__getitem__")
        or hasattr(prompts, "keys")
    ):
        raise RequestError(
            400,
            "prompts are a text, a list of token ids, or a list of such; "
            f"this is of type {type(prompts).__name__}",
            param="prompt",
        )
    return len(prompts) > 0 and hasattr(prompts[0], "__index__")


async def _last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    last: RequestOutput | None = None
    async for output in outputs:
        last = output
    assert last is not None, "an answer has at least its end"
    return last


async def _next(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    return await anext(outputs)


async def _ended(outputs: AsyncGenerator[RequestOutput, None]) -> None:
    """Close the generator; for a moment, an interrupted step of it may still be under way."""
    for _ in range(_CLOSINGS):
        try:
            await outputs.aclose()
        except RuntimeError:  # it is running
            await asyncio.sleep(_CLOSING_S)
        else:
            return


def _close(llm: AsyncLLM, loop: "_LoopThread") -> None:
    loop.run(llm.close())
    loop.stop()


class _LoopThread:
    """An event loop on a thread of its own, which the engine's ranks live as long as."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="drumline-llm", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and return its value; cancels it if the wait is interrupted.

        Raises PeerError when the thread has ended.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise PeerError("the engine was closed") from None
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # At the interpreter's end there are no threads left to shut down.
        with contextlib.suppress(RuntimeError):
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
