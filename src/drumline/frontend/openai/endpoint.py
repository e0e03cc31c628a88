"""A generating route: from the request's bytes to the last byte of its answer."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from msgspec import Struct
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from drumline.core.errors import PeerError, RequestError
from drumline.core.ids import request_id
from drumline.frontend.answer import Piece
from drumline.frontend.generation import Generation
from drumline.frontend.live_requests import Abort
from drumline.frontend.openai.calls import Answer, Call, Frame
from drumline.frontend.openai.parameters import REST, ParameterCheck, Rest
from drumline.frontend.openai.schema import SamplingFields
from drumline.frontend.service import Service
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.frontend.web.dialect import dialect_of
from drumline.frontend.web.errors import (
    as_request_error,
    internal_error,
    shutting_down,
    timed_out,
)
from drumline.frontend.web.incoming import (
    ClientGoneError,
    checked_request_id,
    given_request_id,
    read_body,
    unless_gone,
)
from drumline.frontend.web.reply import Reply

log = logging.getLogger(__name__)

Decode = Callable[[bytes, Tokenizer], Call]


class GeneratingEndpoint:
    """One generating route as an ASGI application.

    `decode` is its dialect, whose bodies are `kind`s; `rest` judges what is no field of them.
    """

    def __init__(
        self,
        service: Service,
        decode: Decode,
        kind: type[Struct],
        id_prefix: str,
        rest: Rest = REST,
    ) -> None:
        self._service = service
        self._decode = decode
        self._parameters = ParameterCheck(kind, rest)
        self._id_prefix = id_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        own_id = request_id(self._id_prefix)
        reply = Reply(send, own_id, dialect_of(scope))
        try:
            given = given_request_id(scope)
            if given is not None:
                reply.request_id = given
            with service.live.entered(reply.request_id):
                if service.engine.closed.is_set():
                    raise as_request_error(PeerError("its process ended"))
                async with (
                    asyncio.timeout(service.server.request_timeout),
                    service.desk.held(counted=True),
                ):
                    body = await read_body(scope, receive, service.server.max_body_bytes)
                    frame = Frame(
                        own_id if given is None else f"{self._id_prefix}-{given}",
                        int(service.clock.wall_s()),
                        service.model,
                    )
                    await unless_gone(receive, self._answer(body, frame, reply))
        except ClientGoneError:
            log.debug("%s: the client left", reply.request_id)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not service.live.broken_off:
                raise
            task.uncancel()  # there is a last word to say, to whoever still reads
            with suppress(asyncio.CancelledError):
                await self._refuse(reply, shutting_down())
        except TimeoutError:
            await self._refuse(reply, timed_out(service.server.request_timeout or 0))
        except RequestError as error:
            await self._refuse(reply, error)
        except PeerError as error:
            await self._refuse(reply, as_request_error(error))
        except Exception:
            log.exception("%s failed", reply.request_id)
            await self._refuse(reply, internal_error())
        finally:
            reply.close()

    async def _refuse(self, reply: Reply, error: RequestError) -> None:
        self._service.metrics.refused(error.status)
        await reply.error(error)

    async def _answer(self, body: bytes, frame: Frame, reply: Reply) -> None:
        service = self._service
        await service.turns.mine()
        call = self._decode(body, service.tokenizer)
        self._parameters.check(body)
        service.check_model(call.fields.model)
        asked = await call.asked(service)
        own, ours = reply.request_id, frame.id == reply.request_id
        named = self._named(call.fields, frame)
        if named is not frame and ours:
            reply.request_id = _given(call.fields) or own
        # The engine forgets an id later than its client, who may use it again at once.
        fresh = ours and named is frame
        rid = named.id if fresh else f"{named.id}-{uuid.uuid4().hex[:8]}"
        generation = Generation(
            asked, rid, service.engine, service.tokenizer, service.metrics, service.clock
        )
        aborts = _aborts(call.fields, generation) | dict.fromkeys((own, named.id), generation.abort)
        chosen = () if fresh else tuple(aborts)
        with service.live.abortable(own, aborts):
            async with service.desk.held(chosen), aclosing(generation.pieces()) as pieces:
                if call.fields.stream:
                    await self._stream(call, generation, pieces, named, reply)
                else:
                    await self._whole(call, generation, pieces, named, reply)

    def _named(self, fields: SamplingFields, frame: Frame) -> Frame:
        """Return the frame under the id that its body gives, if it gives one."""
        if isinstance(fields.rid, str):
            return replace(frame, id=checked_request_id(fields.rid, "rid"))
        if fields.request_id is not None:
            given = checked_request_id(fields.request_id, "request_id")
            return replace(frame, id=f"{self._id_prefix}-{given}")
        return frame

    async def _whole(
        self,
        call: Call,
        generation: Generation,
        pieces: AsyncGenerator[Piece, None],
        frame: Frame,
        reply: Reply,
    ) -> None:
        answers = [Answer() for _ in range(generation.answers)]
        async for piece in pieces:
            answers[piece.index].add(piece)
        await reply.body(call.whole(frame, answers, generation.usage))

    async def _stream(
        self,
        call: Call,
        generation: Generation,
        pieces: AsyncGenerator[Piece, None],
        frame: Frame,
        reply: Reply,
    ) -> None:
        options = call.fields.stream_options
        timings = self._service.timings
        # A refusal by the engine comes first if at all; wait a little to give it its status.
        first: asyncio.Future[Piece] = asyncio.ensure_future(anext(pieces))
        try:
            await asyncio.wait((first,), timeout=timings.first_output_s)
            if first.done():
                first.result()
            await reply.open_stream(timings.ping_s)
            opening = call.opening(frame, generation.answers, generation.usage)
            if opening:
                await reply.events(opening)
            piece = await first
        finally:
            if not first.done():
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
        await reply.events(call.events(frame, piece, generation.usage))
        async for piece in pieces:
            await reply.events(call.events(frame, piece, generation.usage))
        if options is not None and options.include_usage:
            await reply.event(call.usage_event(frame, generation.usage))
        await reply.done()


def _given(fields: SamplingFields) -> str | None:
    """Return the id that a body gives the request as a whole."""
    return fields.rid if isinstance(fields.rid, str) else fields.request_id


def _aborts(fields: SamplingFields, generation: Generation) -> dict[str, Abort]:
    """Return what ends the answers that a body names, by those names.

    A list of ids names the prompts one by one. Raises RequestError 400 where it does not.
    """
    if not isinstance(fields.rid, list):
        given = _given(fields)
        return {} if given is None else {given: generation.abort}
    prompts, choices = len(generation.asked.prompts), generation.asked.choices
    names = [checked_request_id(name, "rid") for name in fields.rid]
    if len(set(names)) != prompts:
        raise RequestError(
            400, f"rid has {len(set(names))} different ids for {prompts} prompts", param="rid",
            code="invalid_value",
        )  # fmt: skip

    def ending(prompt: int) -> Abort:
        answers = range(prompt * choices, (prompt + 1) * choices)
        return lambda: sum([generation.abort(index) for index in answers])

    return {name: ending(prompt) for prompt, name in enumerate(names)}
