"""Whatever the document allows is answered in the document's terms, never with a fault of ours."""

import asyncio
import contextlib
import threading

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from tests.fakes.http import routes_of, served

from drumline.core.config import ServerConfig
from drumline.frontend.openapi import document

EXAMPLES = 5
"""Per route."""
STEERING = {"/pause", "/pause_generation"}
"""Routes after which others would wait."""


@contextlib.contextmanager
def running(embedded):
    """Serve a scripted engine on a thread of its own; its URL."""
    told: list[str] = []
    begun, ends = threading.Event(), threading.Event()

    async def main():
        server = ServerConfig(host="127.0.0.1", port=0, request_timeout=5)
        async with served(embedded, server=server) as it:
            told.append(it.url)
            begun.set()
            await asyncio.to_thread(ends.wait)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert begun.wait(20)
        yield told[0]
    finally:
        ends.set()
        thread.join(20)


def test_what_the_document_allows_is_answered_and_never_a_fault_of_ours(embedded):
    with running(embedded) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        statuses = set()
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path in STEERING:
                continue

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                derandomize=True,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
                database=None,
            )
            @given(case=operation.as_strategy())
            def answered(case):
                reply = case.call(timeout=15)
                statuses.add(reply.status_code)
                assert reply.status_code != 500, (case, reply.text)
                if reply.status_code >= 400:
                    assert reply.json()["error"]["message"], case

            answered()
    assert {200, 400} <= statuses


def test_errors_stand_in_the_document_in_the_shape_they_have(embedded):
    told = document(routes_of(embedded))
    for path, name in (("/v1/messages", "AnthropicErrorBody"), ("/v1/completions", "ErrorBody")):
        default = told["paths"][path]["post"]["responses"]["default"]
        ref = default["content"]["application/json"]["schema"]["$ref"]
        assert ref.endswith(f"/{name}")
        assert "error" in told["components"]["schemas"][name]["required"]
