"""One server of the embedded model for all tests of a module that only ask it things."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from tests.e2e.processes import Server

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--max-total-tokens", "8192")
    try:
        yield server.wait_ready()
        server.signal()
        assert server.wait() == 0, server.said
    finally:
        server.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
