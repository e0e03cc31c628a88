"""/tokenize and /detokenize: what the model makes of a text, and back.

The bodies of vLLM and SGLang are both taken, and the replies have the names of both.
"""

import asyncio

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from drumline.core.errors import RequestError
from drumline.frontend.limits import MAX_SEQUENCES
from drumline.frontend.openai.calls import not_unicode
from drumline.frontend.openai.chat import ChatCall
from drumline.frontend.service import Service
from drumline.frontend.text.detokenizer import Detokenizer
from drumline.frontend.web.incoming import decode_json
from drumline.frontend.web.reply import Reply

_AT_ONCE = 4096
"""Ids that are turned into text before others get a turn."""


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize. A list of texts is answered by a list."""

    prompt: str | list[str] | None = None
    messages: Raw | UnsetType = UNSET
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeBody(Struct):
    """The reply: `tokens` are ids, `token_strs` their texts."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | list[list[str]] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize. A list of lists is answered by a list."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeBody(Struct):
    """The reply, under the names of both engines."""

    prompt: str | list[str]
    text: str | list[str]


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)
_encode = msgspec.json.Encoder().encode


class Tokens:
    """The two routes. Thread: the event loop's."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, body: bytes, reply: Reply) -> None:
        """Answer with the ids of a text, of several, or of a conversation."""
        service = self._service
        request = decode_json(body, _tokenize)
        service.check_model(request.model)
        if (request.prompt is None) == (request.messages is UNSET):
            raise RequestError(
                400, "send either prompt or messages", param="prompt", code="invalid_combination"
            )
        several = isinstance(request.prompt, list)
        if request.prompt is None:
            asked = await ChatCall(body, service.tokenizer).asked(service)
            ids = list(asked.prompts)
        else:
            texts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
            _check_count("prompt", len(texts))
            special = request.add_special_tokens is not False
            ids = [await self._encoded(text, special=special) for text in texts]
        strings = None
        if request.return_token_strs:
            strings = [list(map(self._string, each)) for each in ids]
        await reply.body(
            _encode(
                TokenizeBody(
                    tokens=ids if several else ids[0],
                    count=list(map(len, ids)) if several else len(ids[0]),
                    max_model_len=service.limits.context,
                    token_strs=strings if several or strings is None else strings[0],
                )
            )
        )

    async def detokenize(self, body: bytes, reply: Reply) -> None:
        """Answer with the text of ids; names of special tokens stand in it unless told not to."""
        service = self._service
        request = decode_json(body, _detokenize)
        service.check_model(request.model)
        lists = [each for each in request.tokens if isinstance(each, list)]
        flat = [each for each in request.tokens if isinstance(each, int)]
        if lists and flat:
            raise RequestError(
                400, "tokens mixes ids and lists of them", param="tokens", code="invalid_type"
            )
        _check_count("tokens", len(lists) or 1)
        for ids in (flat, *lists):
            service.limits.check_ids(ids, "tokens")
        skip = bool(request.skip_special_tokens)
        texts = [await self._text(ids, skip_special=skip) for ids in lists or [flat]]
        text = texts if lists else texts[0]
        await reply.body(_encode(DetokenizeBody(text, text)))

    async def _encoded(self, text: str, *, special: bool) -> list[int]:
        # Of any length: who asks may well want to know by how much it is too long.
        try:
            return await self._service.encoder.encode(text, add_special=special, most=None)
        except TypeError:
            raise not_unicode("prompt") from None

    async def _text(self, ids: list[int], *, skip_special: bool) -> str:
        detokenizer = Detokenizer(self._service.tokenizer, skip_special=skip_special)
        text = []
        for begin in range(0, len(ids), _AT_ONCE):
            text.append(detokenizer.add(ids[begin : begin + _AT_ONCE]))
            await asyncio.sleep(0)
        return "".join([*text, detokenizer.finish()])

    def _string(self, token_id: int) -> str:
        return self._service.tokenizer.piece(token_id).decode(errors="replace")


def _check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_SEQUENCES:
        raise RequestError(
            400, f"{name} has {count} entries; from 1 to {MAX_SEQUENCES} are allowed",
            param=name, code="array_above_max_length",
        )  # fmt: skip
