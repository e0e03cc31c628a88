"""POST /v1/embeddings: texts or token ids in, a vector for each out.

The vector is made of what the loaded model's last layer, behind its final norm, has of the
prompt's tokens: their mean, or the last one's; of length one. The model generates text and was
not trained for this, so replies name the pooling. It travels as a request for one token, whose
end tells the vector.
"""

import asyncio
import base64
import logging
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from drumline.client.stream import Stream
from drumline.contract.request import Pooling
from drumline.core.errors import PeerError, RequestError
from drumline.core.ids import request_id
from drumline.frontend.answer import given_up
from drumline.frontend.limits import MAX_SEQUENCES
from drumline.frontend.openai.calls import ids_of, shortened
from drumline.frontend.openai.parameters import REFUSED, ParameterCheck, Refused, Rest
from drumline.frontend.service import Service
from drumline.frontend.web.errors import as_request_error, shutting_down, timed_out
from drumline.frontend.web.incoming import decode_json
from drumline.frontend.web.reply import Reply
from drumline.metrics.requests import RequestOutcome
from drumline.wire.own_params import NAME
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams, normalized

log = logging.getLogger(__name__)

Vector = NDArray[np.float32]


class EmbeddingRequest(Struct, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Pooling | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


class Embedding(Struct):
    """The vector of one input: numbers, or their float32 bytes in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct):
    """What the inputs cost."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """The reply, in the inputs' order."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    pooling: Pooling
    weight_version: str
    """What the weights were called when the last vector came."""
    object: str = "list"


REST = Rest(
    {
        "normalize": Refused("vectors have length one", (True,)),
        "embedding_type": Refused("use encoding_format"),
        "messages": Refused("send texts or token ids as input"),
        "truncate": REFUSED["truncation"],
    },
    {
        "user": "clients are not told apart",
        "input_type": "the model knows one kind of text",
    },
)
"""What becomes of parameters that are no fields of the body."""

_decoder = msgspec.json.Decoder(EmbeddingRequest)
_encode = msgspec.json.Encoder().encode


class Embeddings:
    """The route. Thread: the event loop's."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._parameters = ParameterCheck(EmbeddingRequest, REST)

    async def embed(self, body: bytes, reply: Reply) -> None:
        """Answer with a vector for each input."""
        service = self._service
        try:
            with service.live.entered(reply.request_id):
                if service.engine.closed.is_set():
                    raise as_request_error(PeerError("its process ended"))
                async with (
                    asyncio.timeout(service.server.request_timeout),
                    service.desk.held((reply.request_id,), counted=True),
                ):
                    told = await self._told(body, reply.request_id)
        except asyncio.CancelledError:
            if not service.live.broken_off:
                raise
            raise shutting_down() from None
        except TimeoutError:
            raise timed_out(service.server.request_timeout or 0) from None
        except PeerError as error:
            raise as_request_error(error) from error
        await reply.body(told)

    async def _told(self, body: bytes, name: str) -> bytes:
        service = self._service
        await service.turns.mine()
        request = decode_json(body, _decoder)
        self._parameters.check(body)
        service.check_model(request.model)
        prompts = await self._prompts(request)
        pooling = request.pooling or Pooling.MEAN
        began = service.clock.now_us()
        vectors = []
        streams: list[Stream] = []

        def aborted() -> int:
            running = [stream for stream in streams if not stream.ended]
            for stream in running:
                service.engine.cancel(stream)
            return len(running)

        with service.live.abortable(name, {name: aborted}):
            try:
                for prompt in prompts:
                    asked = self._asked(request, request_id("embd"), prompt, pooling)
                    streams.append(service.engine.submit(asked))
                for stream, prompt in zip(streams, prompts, strict=True):
                    vectors.append(await _vector(stream))
                    self._count(len(prompt), began)
            finally:
                for stream in streams:
                    stream.abort()
        if request.dimensions not in (None, len(vectors[0])):
            raise RequestError(
                400,
                f"dimensions is {request.dimensions}; the model's vectors have {len(vectors[0])}, "
                "and no part of one means what the whole does",
                param="dimensions",
                code="unsupported_parameter",
            )
        base = request.encoding_format == "base64"
        tokens = sum(map(len, prompts))
        return _encode(
            EmbeddingList(
                [
                    Embedding(index, _in_base64(vector) if base else vector.tolist())
                    for index, vector in enumerate(vectors)
                ],
                service.model,
                EmbeddingUsage(tokens, tokens),
                pooling,
                service.engine.weight_version,
            )
        )

    async def _prompts(self, request: EmbeddingRequest) -> Sequence[list[int]]:
        """Return the inputs' ids. Raises RequestError 400 naming what is wrong with them."""
        service = self._service
        inputs = _inputs(request.input)
        special = request.add_special_tokens is not False
        shortens = request.truncate_prompt_tokens is not None
        prompts = await ids_of(
            service, inputs, add_special=special, param="input", shortens=shortens
        )
        cut = shortened(prompts, request.truncate_prompt_tokens, service.limits)
        for ids in cut:
            if not ids:
                raise RequestError(
                    400, "input: a text without tokens has no vector", param="input",
                    code="empty_prompt",
                )  # fmt: skip
            service.limits.answer_tokens(len(ids), 1, param="input", max_param="its one token")
        return cut

    def _asked(
        self, request: EmbeddingRequest, rid: str, prompt: list[int], pooling: Pooling
    ) -> TokenizedGenerateReqInput:
        own: dict[str, object] = {"embed": pooling.value}
        if request.priority:
            own["priority"] = request.priority
        if request.cache_salt:
            own["cache_salt"] = request.cache_salt
        sampling = SamplingParams(
            max_new_tokens=1, temperature=0.0, ignore_eos=True, custom_params={NAME: own}
        )
        return TokenizedGenerateReqInput(
            rid=rid,
            input_ids=prompt,
            sampling_params=normalized(sampling),
            created_time=self._service.clock.wall_s(),
        )

    def _count(self, prompt_tokens: int, began_us: int) -> None:
        self._service.metrics.ended(
            RequestOutcome(
                reason="stop",
                prompt_tokens=prompt_tokens,
                completion_tokens=0,
                cached_tokens=0,
                total_s=(self._service.clock.now_us() - began_us) / 1e6,
                per_token_s=None,
            )
        )


async def _vector(stream: Stream) -> Vector:
    """Return the vector that a request's end tells, of length one.

    Raises RequestError where the engine gives the request up, or knows of no vectors.
    """
    data = None
    async for delta in stream:
        if delta.finished_reason == "abort":
            raise RequestError(400, f"it was aborted: {given_up(delta)}", code="aborted")
        data = (delta.details or {}).get("embedding") or data
    if not isinstance(data, bytes) or not data:
        raise RequestError(501, "this engine tells no vectors of prompts", code="unsupported")
    vector = np.frombuffer(data, "<f4").astype(np.float64)
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length) or length == 0:
        raise RequestError(500, "the model's output was not finite", code="engine_failed")
    return (vector / length).astype(np.float32)


def _inputs(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return the inputs one by one. Raises RequestError 400 for none, too many or mixed ones."""
    if isinstance(given, str):
        return [given]
    ids = [each for each in given if isinstance(each, int)]
    if ids and len(ids) == len(given):
        return [ids]
    whole = [each for each in given if not isinstance(each, int)]
    if not given or len(given) > MAX_SEQUENCES:
        raise RequestError(
            400, f"input has {len(given)} entries; from 1 to {MAX_SEQUENCES} are allowed",
            param="input", code="array_above_max_length" if given else "empty_array",
        )  # fmt: skip
    if ids or len({type(each) for each in whole}) > 1:
        raise RequestError(
            400, "input mixes texts, token ids and lists of them; it must be of one kind",
            param="input", code="invalid_type",
        )  # fmt: skip
    return whole


def _in_base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
