"""What the server is, how loaded its engines are, and whether they answer."""

import asyncio
from typing import Any

import msgspec
from msgspec import Struct
from starlette.types import Scope

from drumline.core.config import Config
from drumline.core.errors import DrumlineError
from drumline.core.ids import request_id
from drumline.core.settings import settings_of
from drumline.core.version import VERSION
from drumline.frontend.health import health_of
from drumline.frontend.service import Service
from drumline.frontend.web.reply import Reply
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams, normalized

_encode = msgspec.json.Encoder().encode
_FULL = 429


class RankLoad(Struct):
    """The load of one data-parallel rank. Pages are those of its KV pool."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_pages: int
    num_total_pages: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float


class Loads(Struct):
    """The reply of /v1/loads: empty lists while engines report nothing."""

    timestamp: float
    version: str
    dp_rank_count: int
    num_requests_in_flight: int
    loads: list[RankLoad]
    aggregate: dict[str, float]


class ModelInfo(Struct):
    """The reply of /model_info."""

    model_path: str
    tokenizer_path: str
    weight_version: str
    is_generation: bool = True


class Probe(Struct, omit_defaults=True):
    """The reply of a probe."""

    status: str
    reason: str | None = None
    models: tuple[str, ...] = ()


class State:
    """The routes. Thread: the event loop's."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def server_info(self, scope: Scope, reply: Reply) -> None:
        """Answer with every setting, and what was made of it; keys are shown to nobody."""
        service = self._service
        info: dict[str, Any] = {"version": VERSION, "model": service.model}
        config = service.config
        for setting in settings_of(Config):
            if setting.field in service.server.secrets:
                continue
            value: Any = config
            for name in setting.place:
                value = getattr(value, name)
            info[setting.field] = value
        # Of those that serve, and not of those that were loaded first.
        info["weight_version"] = service.engine.weight_version
        info["resolved"] = {
            "context_tokens": service.limits.context,
            "kv_pool_tokens": service.limits.pool,
            "vocabulary_tokens": service.limits.vocabulary,
            "dtype": service.registration.dtype,
            "kv_cache_dtype": service.registration.kv_cache_dtype,
            "backend": service.registration.device_backend,
            "device": service.registration.device,
        }
        info["engine"] = service.registration
        info["internal_states"] = self._loads().loads
        await reply.body(_encode(info))

    async def model_info(self, scope: Scope, reply: Reply) -> None:
        """Answer what is served, and what its weights are called."""
        service = self._service
        start = service.config.model.model or service.model
        info = ModelInfo(
            model_path=service.engine.weight_path or start,
            tokenizer_path=start,
            weight_version=service.engine.weight_version,
        )
        await reply.body(_encode(info))

    async def loads(self, scope: Scope, reply: Reply) -> None:
        """Answer with the load of every rank."""
        await reply.body(_encode(self._loads()))

    async def liveness(self, scope: Scope, reply: Reply) -> None:
        """Answer that this process does answer."""
        await reply.body(_encode(Probe("ok")))

    async def readiness(self, scope: Scope, reply: Reply) -> None:
        """Answer whether requests that come now will be served."""
        health = health_of(self._service)
        reason = health.reason
        if health.ok and self._service.engine.unloaded:
            reason = "the weights were dropped by a sleep, and others are still to be loaded"
        if reason is None:
            await reply.body(_encode(Probe("ready", models=self._service.model_names)))
        else:
            await reply.body(_encode(Probe("not ready", reason)), status=503)

    async def generated(self, scope: Scope, reply: Reply) -> None:
        """Answer once every engine made a token for this very request."""
        health = health_of(self._service)
        if not health.ok:
            await reply.body(_encode(Probe("not ready", health.reason)), status=503)
            return
        engines = self._service.engine.engines
        failures = await asyncio.gather(*map(self._failure, range(engines)))
        reason = "; ".join(filter(None, failures))
        if reason:
            await reply.body(_encode(Probe("not ready", reason)), status=503)
        else:
            await reply.body(_encode(Probe("ok")))

    async def _failure(self, engine: int) -> str | None:
        """Return why an engine made no token within the time; None if it did.

        One whose queue is full is at work, or the rest of its health would say so.
        """
        service = self._service
        probe = TokenizedGenerateReqInput(
            rid=request_id("health"),
            input_ids=[0],
            sampling_params=normalized(
                SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
            ),
            stream=True,
            created_time=service.clock.wall_s(),
            data_parallel_rank=engine,
        )
        limit_s = service.timings.probe_s
        try:
            async with asyncio.timeout(limit_s), service.engine.submit(probe) as stream:
                async for delta in stream:
                    details = delta.details or {}
                    if delta.token_ids or details.get("status_code") == _FULL:
                        return None
                    if delta.finished_reason:
                        return f"rank {engine}: {details.get('message') or delta.finished_reason}"
        except TimeoutError:
            return f"rank {engine} made no token within {limit_s:g} s"
        except DrumlineError as error:
            return f"rank {engine}: {error}"
        return f"rank {engine} ended the request without a word"

    def _loads(self) -> Loads:
        service = self._service
        page_tokens = service.page_tokens
        loads = [
            RankLoad(
                dp_rank=rank,
                num_running_reqs=load.num_running,
                num_waiting_reqs=load.num_waiting,
                num_used_pages=load.kv_active_pages,
                num_total_pages=load.kv_total_pages,
                num_used_tokens=load.kv_active_pages * page_tokens,
                max_total_num_tokens=load.kv_total_pages * page_tokens,
                token_usage=load.kv_active_pages / load.kv_total_pages,
            )
            for rank, load in enumerate(service.engine.loads)
        ]
        running = sum(load.num_running_reqs for load in loads)
        waiting = sum(load.num_waiting_reqs for load in loads)
        return Loads(
            timestamp=service.clock.wall_s(),
            version=VERSION,
            dp_rank_count=service.engine.engines,
            num_requests_in_flight=len(service.live),
            loads=loads,
            aggregate={
                "total_running_reqs": running,
                "total_waiting_reqs": waiting,
                "total_reqs": running + waiting,
                "avg_token_usage": sum(load.token_usage for load in loads) / max(1, len(loads)),
            },
        )
