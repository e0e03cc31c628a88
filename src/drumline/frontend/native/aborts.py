"""Ending requests by their ids: the names of SGLang and of vLLM."""

import msgspec
from msgspec import Struct

from drumline.core.errors import RequestError
from drumline.frontend.service import Service
from drumline.frontend.web.incoming import decode_json
from drumline.frontend.web.reply import Reply


class AbortRequest(Struct, kw_only=True):
    """POST /abort_request, /abort and /abort_requests. Ids are those of `X-Request-Id`, of `rid`
    or `request_id` in a body, or of a reply."""

    rid: str | list[str] | None = None
    request_id: str | None = None
    request_ids: list[str] | None = None
    abort_all: bool | None = None

    @property
    def names(self) -> list[str]:
        """The ids that are named, by whichever of the fields."""
        named = [self.rid] if isinstance(self.rid, str) else list(self.rid or ())
        named += self.request_ids or ()
        return named if self.request_id is None else [*named, self.request_id]


class AbortBody(Struct):
    """The reply. An id that nothing goes by, perhaps because it ended, counts as none."""

    success: bool
    aborted: int


_decoder = msgspec.json.Decoder(AbortRequest)
_encode = msgspec.json.Encoder().encode


class Aborts:
    """The routes that end requests."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def abort(self, body: bytes, reply: Reply) -> None:
        """End what is named, or all; their clients are told with the finish reason `abort`."""
        request = decode_json(body, _decoder)
        if not (request.abort_all or request.names):
            raise RequestError(
                400, "name a request as rid, or set abort_all", param="rid",
                code="missing_required_parameter",
            )  # fmt: skip
        await self._end(None if request.abort_all else request.names, reply)

    async def abort_listed(self, body: bytes, reply: Reply) -> None:
        """The same, under the name by which vLLM's clients end all with an empty list."""
        request = decode_json(body, _decoder)
        await self._end(None if request.abort_all else request.names or None, reply)

    async def _end(self, names: list[str] | None, reply: Reply) -> None:
        ended = await self._service.desk.abort(names)
        await reply.body(_encode(AbortBody(True, ended)))
