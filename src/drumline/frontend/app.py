"""The HTTP application: which path is answered by what.

Starlette's router without its application object: that one wraps `send` twice on
every request, and a stream's events should cost nothing beyond themselves. Measured
with uvicorn, uvloop and httptools (CPU per request, 2 cores): one chat reply 170 µs
here, 247 µs in Litestar; a stream of 64 events 1.03 ms and 1.08 ms.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Scope

from drumline.core.version import VERSION
from drumline.frontend.access import Access, Keys
from drumline.frontend.anthropic.dialect import ANTHROPIC
from drumline.frontend.anthropic.messages import MessagesCall, TokenCount
from drumline.frontend.anthropic.request import REST as MESSAGES_REST
from drumline.frontend.anthropic.schema import CountRequest, MessagesRequest
from drumline.frontend.control_routes import control_routes
from drumline.frontend.health import health_of
from drumline.frontend.native.aborts import AbortRequest, Aborts
from drumline.frontend.native.generate import GenerateCall, GenerateRequest
from drumline.frontend.native.state import State
from drumline.frontend.native.tokens import DetokenizeRequest, TokenizeRequest, Tokens
from drumline.frontend.openai.chat import ChatCall
from drumline.frontend.openai.completions import CompletionCall
from drumline.frontend.openai.embeddings import EmbeddingRequest, Embeddings
from drumline.frontend.openai.endpoint import Decode, GeneratingEndpoint
from drumline.frontend.openai.schema import (
    ChatRequest,
    CompletionRequest,
    ModelBody,
    ModelList,
)
from drumline.frontend.openapi import Entry, document, page
from drumline.frontend.responses.call import ResponsesCall
from drumline.frontend.responses.dialect import RESPONSES
from drumline.frontend.responses.request import REST as RESPONSES_REST
from drumline.frontend.responses.schema import ResponsesRequest
from drumline.frontend.service import Service
from drumline.frontend.web.dialect import OPENAI, Speaking
from drumline.frontend.web.reply import Reply
from drumline.frontend.web.routes import Only, Plain, Reading, unknown_path

_encode = msgspec.json.Encoder().encode


def create_app(service: Service) -> ASGIApp:
    """Return the ASGI application that serves `service`.

    Raises ConfigError for keys that cannot be read.
    """
    keys = Keys.of(service.server)
    router = Router(
        routes=[Route(entry.path, _guarded(entry, keys)) for entry in entries(service)],
        redirect_slashes=False,
        default=Plain(unknown_path),
    )
    origins = service.server.allowed_origins
    if not origins:
        return router
    # Around all, as a browser asks leave without a key.
    return CORSMiddleware(
        router,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
    )


def _guarded(entry: Entry, keys: Keys) -> ASGIApp:
    """Return a route's application behind its methods and keys, which refuse in its dialect."""
    app = Only(entry.methods.split(), keys.guarded(entry.access, entry.app))
    return app if entry.dialect is OPENAI else Speaking(entry.dialect, app)


def entries(service: Service) -> list[Entry]:
    """Return every route, and who may call it."""
    doing = [
        *_model_routes(service),
        *_other_dialects(service),
        *_probes(service),
        *_control_routes(service),
    ]
    told = _Told(doing)
    return [
        *doing,
        Entry("GET", "/openapi.json", Access.OPEN, Plain(told.document), "these routes, for tools"),
        Entry("GET", "/docs", Access.OPEN, Plain(told.page), "these routes, for people"),
    ]


def _model_routes(service: Service) -> list[Entry]:
    show, tokens, state = _Showing(service), Tokens(service), State(service)
    limit = service.server.max_body_bytes
    tokenize, detokenize = Reading(limit, tokens.tokenize), Reading(limit, tokens.detokenize)
    info, client = Plain(state.server_info), Access.CLIENT
    return [
        _text(service, "/v1/chat/completions", ChatCall, ChatRequest, "chatcmpl"),
        _text(service, "/v1/completions", CompletionCall, CompletionRequest, "cmpl"),
        _text(service, "/generate", GenerateCall, GenerateRequest, "gen"),
        Entry(
            "POST",
            "/v1/embeddings",
            client,
            Reading(limit, Embeddings(service).embed),
            "vectors of texts",
            EmbeddingRequest,
        ),
        *(
            Entry("POST", prefix + path, client, app, about, body)
            for prefix in ("", "/v1")
            for path, app, about, body in (
                ("/tokenize", tokenize, "a text's token ids", TokenizeRequest),
                ("/detokenize", detokenize, "the text of token ids", DetokenizeRequest),
            )
        ),
        Entry("GET", "/v1/models", client, Plain(show.models), "the names of the model"),
        Entry("GET", "/v1/models/{model:path}", client, Plain(show.model), "one of them"),
        Entry("GET", "/server_info", client, info, "every setting, and what it came to"),
        Entry("GET", "/get_server_info", client, info, "every setting, and what it came to"),
        *(
            Entry("GET", path, client, Plain(state.model_info), "the checkpoint that serves")
            for path in ("/model_info", "/get_model_info")
        ),
        Entry("GET", "/v1/loads", client, Plain(state.loads), "the load of every rank"),
        Entry("GET", "/debug/kv", client, Plain(show.caches), "where every KV page is"),
    ]


def _other_dialects(service: Service) -> list[Entry]:
    """Return the routes that serve the model in APIs other than OpenAI's first two."""
    messages = GeneratingEndpoint(service, MessagesCall, MessagesRequest, "msg", MESSAGES_REST)
    responses = GeneratingEndpoint(service, ResponsesCall, ResponsesRequest, "resp", RESPONSES_REST)
    count = Reading(service.server.max_body_bytes, TokenCount(service).count)
    client, about = Access.CLIENT, "generate text"
    return [
        Entry("POST", "/v1/messages", client, messages, about, MessagesRequest, ANTHROPIC),
        Entry(
            "POST", "/v1/messages/count_tokens", client, count, "how long a prompt is",
            CountRequest, ANTHROPIC,
        ),
        Entry("POST", "/v1/responses", client, responses, about, ResponsesRequest, RESPONSES),
    ]  # fmt: skip


def _text(service: Service, path: str, decode: Decode, body: type[Struct], id_prefix: str) -> Entry:
    """Return a route that generates, in one dialect."""
    app = GeneratingEndpoint(service, decode, body, id_prefix)
    return Entry("POST", path, Access.CLIENT, app, "generate text", body)


def _probes(service: Service) -> list[Entry]:
    show, state = _Showing(service), State(service)
    ready, alive, probe = Plain(state.readiness), Plain(state.liveness), Access.OPEN
    return [
        Entry("GET", "/health", probe, Plain(show.health), "whether engine and server get on"),
        Entry(
            "GET",
            "/health_generate",
            probe,
            Plain(state.generated),
            "whether every engine makes a token now",
        ),
        Entry("GET", "/liveness", probe, alive, "whether the server answers"),
        Entry("GET", "/ping", probe, alive, "whether the server answers"),
        Entry("GET", "/readiness", probe, ready, "whether requests are served"),
        Entry("GET", "/ready", probe, ready, "whether requests are served"),
        Entry("GET", "/metrics", probe, Plain(show.metrics), "metrics, for Prometheus"),
        Entry("GET", "/version", probe, Plain(show.version), "versions of server and engine"),
    ]


def _control_routes(service: Service) -> list[Entry]:
    limit, ending = service.server.max_body_bytes, Aborts(service)
    one, listed = Reading(limit, ending.abort), Reading(limit, ending.abort_listed)
    aborts = [
        Entry("POST", path, Access.CONTROL, app, about, AbortRequest)
        for path, app, about in (
            ("/abort_request", one, "end requests by their ids"),
            ("/abort", one, "end requests by their ids"),
            ("/abort_requests", listed, "end requests by their ids, or all where none is named"),
        )
    ]
    return aborts + [
        Entry(methods, path, Access.CONTROL, app, "steer the engine")
        for methods, path, app in control_routes(service)
    ]


class _Told:
    """What is told of the routes themselves."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._document = _encode(document(entries))
        self._page = page(entries).encode()

    async def document(self, scope: Scope, reply: Reply) -> None:
        await reply.body(self._document)

    async def page(self, scope: Scope, reply: Reply) -> None:
        await reply.body(self._page, kind=b"text/html; charset=utf-8")


class _Version(Struct):
    version: str
    engine: str


class _Showing:
    """The routes that only show something."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, scope: Scope, reply: Reply) -> None:
        names = self._service.model_names
        await reply.body(_encode(ModelList([self._body(name) for name in names])))

    async def model(self, scope: Scope, reply: Reply) -> None:
        name = scope["path_params"]["model"]
        self._service.check_model(name)
        await reply.body(_encode(self._body(name)))

    async def health(self, scope: Scope, reply: Reply) -> None:
        service = self._service
        progress = await service.control.progress(service.timings.progress_s)
        health = health_of(service, progress)
        await reply.body(_encode(health), status=200 if health.ok else 503)

    async def metrics(self, scope: Scope, reply: Reply) -> None:
        text = await self._service.desk.metrics()
        await reply.body(text, kind=CONTENT_TYPE_LATEST.encode())

    async def caches(self, scope: Scope, reply: Reply) -> None:
        await self._service.caches.ask()
        await reply.body(_encode(self._service.caches.view()))

    async def version(self, scope: Scope, reply: Reply) -> None:
        engine = self._service.registration.vllm_version
        await reply.body(_encode(_Version(VERSION, engine)))

    def _body(self, name: str) -> ModelBody:
        service = self._service
        return ModelBody(name, service.created, service.limits.context)
