"""What clients see of little memory: prefixes that come back, and ends with a reason."""

import concurrent.futures
import json
import re
import time

import httpx
import pytest
from tests.e2e.processes import Server

PAGES = 24
TOKENS = 16 * PAGES
CONTEXT = 512
ROOM = TOKENS - 16 - 1
"""What one request may have: a page is for the copy of a shared one, a token for what is ahead."""


@pytest.fixture(scope="module")
def http():
    """A client of the embedded model on very few pages: a host tier, and nowhere to suspend to."""
    flags = ("--max-total-tokens", str(TOKENS), "--max-model-len", str(CONTEXT))
    server = Server(
        *flags,
        *("--enable-kvstore", "--kvstore-ratio", "6", "--retraction-snapshot-max-requests", "0"),
        *("--dtype", "float32", "--max-num-seqs", "8", "--no-share-prefix-in-flight"),
    )
    try:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client:
            yield client
    finally:
        server.close()


def complete(http, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True} | fields
    return http.post("/v1/completions", json=body)


def kv(http):
    answer = http.get("/debug/kv").json()
    assert answer["conserved"], answer
    (rank,) = answer["ranks"]
    return rank


def settled(http):
    """Return the same once no copy of earlier requests is under way."""
    deadline = time.monotonic() + 30
    while (rank := kv(http))["open_operations"]:
        assert time.monotonic() < deadline, rank
        time.sleep(0.05)
    return rank


def metric(http, name, labels=""):
    text = http.get("/metrics").text
    (value,) = re.findall(
        rf"^{re.escape(name)}\{{[^}}]*{labels}[^}}]*\}} (\S+)$", text, re.MULTILINE
    )
    return float(value)


def test_a_second_turn_whose_pages_left_the_device_is_loaded_back_and_reported_as_cached(http):
    prompt = list(range(1000, 1200))
    first = complete(http, prompt, logprobs=1).json()
    assert first["usage"]["prompt_tokens"] == 200
    assert cached(first) == 0
    for n in range(2, 5):
        # Each takes more than half the pool, so that of the first prompt nothing is left there.
        assert complete(http, list(range(1000 * n, 1000 * n + 240))).status_code == 200
    before = kv(http)
    assert before["counters"]["loads"] == 0
    assert before["pools"]["host"]["cached"] >= 12
    second = complete(http, prompt, logprobs=1).json()
    assert cached(second) == 192
    after = kv(http)
    assert after["counters"]["loads"] == 1
    assert after["counters"]["hit_tokens"] == 192
    assert after["counters"]["host"]["loaded_blocks"] == 12
    # Loaded or computed, the answer is the same.
    mine, computed = second["choices"][0], first["choices"][0]
    assert mine["text"] == computed["text"]
    assert mine["logprobs"]["token_logprobs"] == pytest.approx(
        computed["logprobs"]["token_logprobs"], abs=1e-3
    )
    assert metric(http, "drumline:cache_loads_total") == 1
    assert metric(http, "drumline:cache_loaded_blocks_total", 'tier="host"') == 12
    assert metric(http, "drumline:cache_pages", 'held_by="lost".*pool="device"') == 0
    # On from there: the next turn finds on the device what came back, and what was computed.
    assert cached(complete(http, [*prompt, *range(500, 540)]).json()) == 200


def cached(answer):
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


@pytest.mark.parametrize(
    ("prompt", "answer", "numbers"),
    [(400, 4, "has 400 tokens"), (200, 300, "200 tokens and max_tokens 300 are 500 tokens")],
    ids=["a prompt", "a prompt and its answer"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_never_fit_the_pool_is_refused_at_once_with_both_numbers(
    http, prompt, answer, numbers, stream
):
    # The model's context would hold it.
    assert prompt + answer < CONTEXT
    before = settled(http)
    asked = [2000 + n for n in range(prompt)]
    refused = complete(http, asked, max_tokens=answer, stream=stream)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "kv_pool_exceeded"
    assert error["type"] == "invalid_request_error"
    assert numbers in error["message"]
    assert f"the engine's KV pool holds {ROOM}" in error["message"]
    # The engine never saw it.
    assert kv(http)["counters"] == before["counters"]


def test_what_just_fits_the_pool_is_answered(http):
    asked = [2000 + n for n in range(ROOM - 4)]
    answered = complete(http, asked, max_tokens=4)
    assert answered.status_code == 200
    assert answered.json()["usage"]["total_tokens"] == ROOM


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_ends_for_want_of_memory_is_told_so_with_the_numbers(http, stream):
    # Two that grow past the pool together, which neither declared.
    before = kv(http)["counters"]["aborts"]

    def ask(word):
        body = {
            "messages": [{"role": "user", "content": f"{word} " * 140}],
            "ignore_eos": True,
            "stream": stream,
        }
        return http.post("/v1/chat/completions", json=body)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, ("one", "two")))
    errors = [error for error in map(ending, answers) if error is not None]
    (error,) = errors
    assert f"out_of_pages: none of {PAGES} pages is free" in error["message"]
    assert error["type"] == "server_error"
    if not stream:
        assert sorted(answer.status_code for answer in answers) == [200, 503]
    assert kv(http)["counters"]["aborts"] == before + 1
    assert metric(http, "drumline:capacity_aborts_total") == before + 1


def ending(answer):
    """Return the error an answer ended with, in its body or in its last event but the sentinel."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json().get("error")
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return json.loads(events[-2]).get("error")
