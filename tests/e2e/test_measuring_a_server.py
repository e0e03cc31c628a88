"""`drumline bench` beside a server that runs."""

import json
import subprocess
import sys

import pytest
from tests.e2e.processes import Server, environment

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LIMIT_S = 120


@pytest.fixture(scope="module")
def tiny_server(tiny_model):
    server = Server(
        "--model",
        str(tiny_model),
        *("--served-model-name", "tiny", "--chat-template", TEMPLATE),
        *("--max-total-tokens", "4096", "--api-key", "key"),
    )
    try:
        yield server.wait_ready()
        server.signal()
        assert server.wait() == 0, server.said
    finally:
        server.close()


def bench(server, *flags):
    return subprocess.run(
        [sys.executable, "-m", "drumline", "bench", "--base-url", server.url, *flags],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(),
        check=False,
    )


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_what_clients_would_have_seen_is_printed_and_written(tiny_server, endpoint, tmp_path):
    file = tmp_path / "figures.json"
    ran = bench(
        tiny_server,
        *("--endpoint", endpoint, "--api-key", "key", "--vocab-size", "512"),
        *("--num-prompts", "6", "--random-input-len", "16", "--random-output-len", "5"),
        *("--request-rate", "50", "--max-concurrency", "2", "--output-file", str(file)),
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("6 answers in ")
    figures = json.loads(file.read_text())
    assert (figures["model"], figures["endpoint"]) == ("tiny", endpoint)
    assert (figures["completed"], figures["failed"]) == (6, 0)
    assert figures["total_output_tokens"] == 30
    if endpoint == "/v1/completions":
        assert figures["total_input_tokens"] == 6 * 16
    assert figures["concurrency"] <= 2
    assert 0 < figures["median_ttft_ms"] < figures["median_e2el_ms"]


def test_a_server_that_refuses_is_one_line_and_status_1(tiny_server):
    ran = bench(tiny_server, "--api-key", "other")
    assert ran.returncode == 1
    assert "answered 401" in ran.stderr
    assert ran.stderr.count("\n") == 1
