"""Asking a running server what a load holds, and keeping when its answers came.

Any server of the OpenAI API will do. A piece of an answer counts when it has text; how many
tokens there were is what the server says in its usage, or else the number of pieces.
"""

import asyncio
import resource
from collections.abc import Callable

import msgspec
from msgspec import Struct

from drumline.bench.client import Target, connected, target_of
from drumline.bench.figures import Answer
from drumline.bench.load import Asked, body_of, drawn
from drumline.core.clock import SystemClock
from drumline.core.config.bench import Endpoint, LoadConfig, TargetConfig
from drumline.core.errors import ConfigError, PeerError

_OTHER_FILES = 64
"""What a process has open besides connections, amply."""


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


class Results(Struct, frozen=True):
    """What became of all requests."""

    model: str
    answers: list[Answer]
    failures: list[str]
    """Why each of the others has no answer."""


_event = msgspec.json.Decoder(_Event).decode
_models = msgspec.json.Decoder(_Models).decode


async def measured(
    config: TargetConfig, load: LoadConfig, on_end: Callable[[int], None] = lambda _: None
) -> Results:
    """Send the requests of a load when they are due; `on_end` hears how many have ended.

    One request goes ahead and does not count. Raises ConfigError, and PeerError where the
    server does not even answer that one.
    """
    target = target_of(config.base_url, config.api_key)
    _make_room(min(load.num_prompts, load.max_concurrency or load.num_prompts))
    try:
        async with asyncio.timeout(config.request_timeout):
            model = config.model or await _first_model(target)
        asking = _Asking(target, config, model, ignore_eos=load.ignore_eos)
        (ahead,) = drawn(
            msgspec.structs.replace(load, num_prompts=1, seed=load.seed + 1), config.endpoint
        )
        await asking.answer(ahead)
    except (OSError, PeerError, TimeoutError) as error:
        raise PeerError(f"{config.base_url}: {_reason(error)}") from None
    room = asyncio.Semaphore(load.max_concurrency or load.num_prompts)
    loop = asyncio.get_running_loop()
    answers: list[Answer] = []
    failures: list[str] = []
    began = loop.time()

    async def one(asked: Asked) -> None:
        await asyncio.sleep(began + asked.due_s - loop.time())
        async with room:
            try:
                answers.append(await asking.answer(asked))
            except (OSError, PeerError, TimeoutError) as error:
                failures.append(_reason(error))
        on_end(len(answers) + len(failures))

    async with asyncio.TaskGroup() as group:
        for asked in drawn(load, config.endpoint):
            group.create_task(one(asked))
    return Results(model, answers, failures)


class _Asking:
    """How one server is asked."""

    def __init__(
        self, target: Target, config: TargetConfig, model: str, *, ignore_eos: bool
    ) -> None:
        self._target = target
        self._path: Endpoint = config.endpoint
        self._limit_s = config.request_timeout
        self._model = model
        self._ignore_eos = ignore_eos
        self._clock = SystemClock()

    async def answer(self, asked: Asked) -> Answer:
        """Raises OSError, PeerError and TimeoutError."""
        body = msgspec.json.encode(body_of(asked, self._model, ignore_eos=self._ignore_eos))
        stamps: list[float] = []
        usage = _Usage()

        def heard(data: bytes) -> None:
            nonlocal usage
            now = self._clock.now_us() / 1e6
            try:
                event = _event(data)
            except msgspec.MsgspecError as error:
                raise PeerError(f"an event cannot be read: {error}") from None
            if event.error is not None:
                raise PeerError(f"the answer broke off: {event.error}")
            usage = event.usage or usage
            if any(map(_has_text, event.choices)):
                stamps.append(now)

        async with asyncio.timeout(self._limit_s), connected(self._target) as connection:
            began = self._clock.now_us() / 1e6
            await connection.post(self._path, body, heard)
        if not stamps:
            raise PeerError("an answer has no text")
        return Answer(
            began_s=began,
            stamps_s=stamps,
            input_tokens=usage.prompt_tokens or asked.input_tokens,
            output_tokens=usage.completion_tokens or len(stamps),
        )


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or (delta and (delta.content or delta.reasoning_content)))


async def _first_model(target: Target) -> str:
    async with connected(target) as connection:
        said = await connection.get("/v1/models")
    try:
        return _models(said).data[0].id
    except (msgspec.MsgspecError, IndexError):
        raise PeerError("/v1/models names no model; name one with --model") from None


def _make_room(connections: int) -> None:
    """Have the system allow as many open files as there may be connections."""
    least = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < least:
        raise ConfigError(
            "--max-concurrency",
            f"{connections} connections are more than the {hard} files that this system allows",
        )
    if soft != resource.RLIM_INFINITY and soft < least:
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))


def _reason(error: BaseException) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or repr(error)
