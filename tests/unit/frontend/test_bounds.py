"""Bounds on what one client can take: time, streams, unread answers; TLS and other origins."""

import asyncio
import ssl
import subprocess

import httpx
import pytest
from tests.fakes.http import events_of, run, served, until
from tests.unit.frontend.test_streams import raw_request

from drumline.core.config import ServerConfig
from drumline.core.errors import ConfigError
from drumline.frontend.serve import check
from drumline.frontend.service import Timings

LONG = "word " * 1500
PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}


def local(**settings) -> ServerConfig:
    return ServerConfig(host="127.0.0.1", port=0, **settings)


@run
async def test_a_request_that_takes_too_long_ends_with_408_and_its_work_too(embedded):
    async with served(embedded, server=local(request_timeout=0.2)) as it:
        it.fake.held.set()
        late = await it.chat()
        assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")
        assert late.headers["x-should-retry"] == "false"
        await until(lambda: it.fake.aborted)
        assert (it.service.engine.in_flight, len(it.service.live)) == (0, 0)


@run
async def test_a_stream_that_takes_too_long_ends_with_an_error_and_the_sentinel(embedded):
    async with served(embedded, says=LONG, step_s=0.01, server=local(request_timeout=0.3)) as it:
        *events, error, last = await it.events()
        assert events
        assert (error["error"]["code"], last) == ("request_timeout", "[DONE]")
        await until(lambda: it.fake.aborted)


@run
async def test_a_body_that_comes_too_slowly_ends_with_408(embedded):
    async with served(embedded, server=local(request_timeout=0.2)) as it:
        host, port = it.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()


@run
async def test_more_streams_than_are_allowed_are_told_to_come_back(embedded):
    async with served(embedded, server=local(max_concurrent_streams=2)) as it:
        it.fake.held.set()
        running = [asyncio.create_task(it.chat()) for _ in range(2)]
        await until(lambda: len(it.fake.requests) == 2)
        refused = await it.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) > 0
        assert (await it.http.get("/health")).status_code == 200
        it.fake.held.clear()
        assert [(await reply).status_code for reply in running] == [200, 200]
        assert (await it.chat()).status_code == 200


@run
async def test_a_refusal_of_the_engine_for_want_of_room_says_when_to_come_back(embedded):
    for status in (429, 503):
        details = {"status_code": status, "message": "full"}
        async with served(embedded, refuse=lambda _, details=details: details) as it:
            refused = await it.chat()
            assert refused.status_code == status
            assert int(refused.headers["retry-after"]) > 0


@run
async def test_a_client_that_stops_reading_is_hung_up_on(embedded):
    timings = Timings(ping_s=0.05)
    server = local(unread_timeout=0.5)
    async with served(embedded, says="word " * 1900, timings=timings, server=server) as it:
        # Enough answers to fill every buffer between here and there.
        reader, writer = await raw_request(it, stream=True, n=100, logprobs=True, top_logprobs=9)
        await until(lambda: len(it.fake.requests) == 100)
        await it.service.live.idle.wait()
        assert it.service.engine.in_flight == 0
        with pytest.raises(ConnectionError):
            await reader.read()  # to its end, which there would be if all had been sent
        writer.close()


@run
async def test_a_client_that_reads_slowly_but_reads_gets_all_of_it(embedded):
    async with served(embedded, says=LONG, server=local(unread_timeout=0.5)) as it:
        reader, writer = await raw_request(it, stream=True, n=4, logprobs=True, top_logprobs=9)
        text = b""
        while b"[DONE]" not in text[-100:]:
            text += await reader.read(2**16)
            await asyncio.sleep(0.02)
        writer.close()
        assert text.count(b'"finish_reason":"stop"') == 4


@run
async def test_pages_of_an_allowed_origin_may_call_and_others_may_not(embedded):
    server = local(allowed_origins=("https://a.example",), api_key=("one",))
    async with served(embedded, server=server) as it:
        asked = await it.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://a.example"
        other = PREFLIGHT | {"Origin": "https://b.example"}
        refused = await it.http.options("/v1/chat/completions", headers=other)
        assert "access-control-allow-origin" not in refused.headers
        headers = {"Origin": "https://a.example", "Authorization": "Bearer one"}
        reply = await it.chat(headers=headers)
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-request-id" in reply.headers["access-control-expose-headers"]


@run
async def test_no_origin_is_allowed_by_default(embedded):
    async with served(embedded) as it:
        asked = await it.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert asked.status_code == 405
        assert not any(name.startswith("access-control") for name in asked.headers)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    key, cert = (str(tmp_path_factory.mktemp("tls") / name) for name in ("key.pem", "cert.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", key, "-out", cert, "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, cert


@run
async def test_https_is_spoken_with_a_certificate(embedded, certificate):
    key, cert = certificate
    server = local(ssl_keyfile=key, ssl_certfile=cert)
    check(server)
    async with served(embedded, server=server) as it:
        assert it.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(base_url=it.url, verify=trusting) as http:
            reply = await http.post("/v1/completions", json={"prompt": "a", "stream": True})
            *_, last = events_of(reply.text)
            assert last == "[DONE]"


def test_a_certificate_that_is_none_is_refused_at_once(certificate, tmp_path):
    key, _ = certificate
    with pytest.raises(ConfigError, match=r"--ssl-certfile.*not a certificate"):
        check(local(ssl_certfile=key, ssl_keyfile=key))
    with pytest.raises(ConfigError, match=r"--ssl-certfile.*No such file"):
        check(local(ssl_certfile=str(tmp_path / "none"), ssl_keyfile=key))
    with pytest.raises(ConfigError, match=r"--ssl-keyfile.*without --ssl-certfile"):
        local(ssl_keyfile=key)


@run
async def test_a_server_that_all_can_reach_without_a_key_says_so(embedded, caplog):
    async with served(embedded, server=ServerConfig(host="0.0.0.0", port=0)):
        assert "there are no keys" in caplog.text
    caplog.clear()
    async with served(embedded, server=local()):
        assert "there are no keys" not in caplog.text
