"""The TokenSpeed gateway drives real ranks: `drumline serve --headless`, and `--gateway smg`.

Needs the PyPI package `tokenspeed-smg`, as `test_gateway` does; without it these are skipped.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from tests.e2e.gateways import TEMPLATE, byte_tokenizer, free_port, needs_smg
from tests.e2e.processes import Server, eventually, gone_within

pytestmark = needs_smg

READY = "drumline serve ready: "
ENGINE = ("--dtype", "float32", "--data-parallel-size", "2", "--max-total-tokens", "8192")
START_S = 120
BACK_S = 90
"""The gateway takes some time to notice an engine that was killed."""


@pytest.fixture(scope="module")
def spoken_model(tiny_model, tmp_path_factory):
    """Return a directory with a model that the gateway can speak with."""
    directory = tmp_path_factory.mktemp("spoken") / "tiny"
    shutil.copytree(tiny_model, directory)
    byte_tokenizer(words=512 - 257).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"})
    )
    return directory


class Gateway:
    """A running gateway, what it is asked, and the ranks behind it."""

    def __init__(self, model):
        self.port, self.wire = free_port(), free_port()
        self.model = model
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "smg", "launch"),
                *("--host", "127.0.0.1", "--port", str(self.port)),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
                *("--worker-urls", f"tcp://127.0.0.1:{self.wire}", "--backend", "tokenspeed"),
                *("--model-path", model.name, "--policy", "passthrough", "--enable-rl"),
                *("--disable-retries", "--disable-circuit-breaker", "--log-level", "error"),
                *("--health-check-interval-secs", "2", "--health-failure-threshold", "1"),
            ],
            cwd=model.parent,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        self.ranks = None

    def start_ranks(self):
        if self.ranks is not None:
            self.ranks.close()
        self.ranks = Server(
            *("--headless", "--data-parallel-rpc-port", str(self.wire), *ENGINE),
            *("--model", str(self.model)),
            ready=READY,
        )

    def serves(self):
        with contextlib.suppress(httpx.TransportError):
            return self.ask(max_tokens=2).status_code == 200
        return False

    def ask(self, **changes):
        return self.http.post("/v1/chat/completions", json=chat(**changes))

    def answer(self, **changes):
        reply = self.ask(**changes)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def call(self, method, body=None):
        """Have every rank carry out an operation; return what they say, joined."""
        worker = self.http.get("/workers").json()["workers"][0]["id"]
        reply = self.http.post(f"/v1/rl/workers/{worker}/engine/{method}", json=body or {})
        assert reply.json()["body"]["success"], reply.text
        return reply.json()["body"]["message"]

    def pools(self):
        """Return the ranks' device pools, as censuses of their pages; equal ones are one."""
        states = self.call("cache_state").split("; ")
        return [json.loads(state)["pools"]["device"] for state in states]

    def close(self):
        self.http.close()
        self.process.kill()
        self.process.wait(20)
        if self.ranks is not None:
            self.ranks.close()


def chat(**changes):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me of the sea."}],
        "max_tokens": 24,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    return body | changes


@pytest.fixture(scope="module")
def gateway(spoken_model):
    """A gateway that serves two data-parallel ranks."""
    gateway = Gateway(spoken_model)
    try:
        gateway.start_ranks()
        eventually(gateway.serves, START_S)
        yield gateway
    finally:
        gateway.close()


def test_both_ranks_answer_alike_whole_and_streamed_and_for_every_n(gateway):
    text = gateway.answer()["choices"][0]["message"]["content"]
    assert text
    for choice in gateway.answer(n=4)["choices"]:
        assert choice["message"]["content"] == text
        assert choice["finish_reason"] == "length"
    streamed = ""
    with gateway.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed += choice["delta"].get("content") or ""
    assert streamed == text
    served = {rank for rank in (0, 1) if f"#dp-rank: {rank}" in gateway.ranks.said}
    assert served == {0, 1}


def test_top_log_probabilities_fall_from_the_token_that_was_taken(gateway):
    content = gateway.answer(logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert len(content) == 24
    for place in content:
        told = [one["logprob"] for one in place["top_logprobs"]]
        assert told == sorted(told, reverse=True)
        assert place["logprob"] == told[0]


def test_a_client_that_leaves_ends_its_request(gateway):
    with gateway.http.stream(
        "POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=450)
    ) as reply:
        name = json.loads(next(reply.iter_lines()).removeprefix("data: "))["id"]
    eventually(lambda: any(name in line and "reason=abort" in line for line in gateway.ranks.lines))


def test_operations_reach_every_rank_and_their_answers_come_back(gateway):
    assert gateway.call("is_scheduler_paused") == "false"
    gateway.call("pause_scheduler", {"mode": "wait"})
    assert gateway.call("is_scheduler_paused") == "true"
    gateway.call("resume_scheduler")
    assert gateway.http.post("/flush_cache").status_code == 200
    assert not any(pool["cached"] for pool in gateway.pools())


def test_two_hundred_random_cancels_leave_every_page_where_it_was(gateway):
    draw = random.Random(7)
    seen = []

    def one(number):
        words = " ".join(f"w{draw.randrange(200)}" for _ in range(draw.randint(1, 20)))
        body = chat(
            messages=[{"role": "user", "content": words}],
            stream=True,
            max_tokens=draw.randint(2, 150),
            n=draw.choice((1, 1, 2)),
        )
        with gateway.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            for _ in zip(range(draw.randrange(40)), reply.iter_lines(), strict=False):
                pass
        seen.append(number)

    threads = []
    for number in range(200):
        threads.append(threading.Thread(target=one, args=(number,)))
        threads[-1].start()
        if len(threads) % 8 == 0:
            for thread in threads[-8:]:
                thread.join(60)
    assert len(seen) == 200
    eventually(lambda: not any(pool["active"] for pool in gateway.pools()), 30)
    for pool in gateway.pools():
        assert pool["cached"] + pool["empty"] == pool["pages"], pool
    assert gateway.ranks.said.count("reason=abort") > 50
    gateway.call("flush_cache")
    assert all(pool["empty"] == pool["pages"] for pool in gateway.pools())


def test_ranks_that_stop_fail_what_runs_and_register_anew(gateway):
    before = gateway.answer()["choices"][0]["message"]["content"]
    failed = []

    def long():
        failed.append(gateway.ask(max_tokens=450).status_code)

    asking = threading.Thread(target=long)
    asking.start()
    time.sleep(0.3)
    gateway.ranks.signal(signal.SIGTERM)
    assert gateway.ranks.wait() == 0
    asking.join(30)
    assert failed == [503]
    assert gateway.ask().status_code == 503
    gateway.start_ranks()
    eventually(gateway.serves, BACK_S)
    assert gateway.answer()["choices"][0]["message"]["content"] == before


def test_ranks_that_are_killed_are_noticed_and_register_anew(gateway):
    before = gateway.answer()["choices"][0]["message"]["content"]
    gateway.ranks.ranks()[1].kill()
    assert gateway.ranks.wait() == 1
    assert "killed by SIGKILL" in gateway.ranks.lines[-1]
    gateway.start_ranks()
    eventually(gateway.serves, BACK_S)
    assert gateway.answer()["choices"][0]["message"]["content"] == before


def test_ranks_end_with_their_gateway(gateway):
    """The last one: it ends the gateway."""
    processes = gateway.ranks.ranks()
    gateway.process.kill()
    assert gateway.ranks.wait(30) == 1
    assert "the frontend is gone" in gateway.ranks.lines[-1]
    assert gone_within(processes, 5)


def test_one_command_starts_gateway_and_ranks_and_ends_both(spoken_model):
    server = Server(
        *("--gateway", "smg", "--served-model-name", "tiny", "other", "--api-key", "sesame"),
        *("--dtype", "float32", "--max-total-tokens", "4096", "--model", str(spoken_model)),
    )
    try:
        server.wait_ready()
        processes = server.ranks()
        assert len(processes) == 2
        with httpx.Client(base_url=server.url, timeout=60) as http:
            assert http.post("/v1/chat/completions", json=chat()).status_code == 401
            http.headers["Authorization"] = "Bearer sesame"
            for name in ("tiny", "other"):
                reply = http.post("/v1/chat/completions", json=chat(model=name))
                assert reply.json()["usage"]["completion_tokens"] == 24
            # An abort is an answer: it comes once, and what it says comes through.
            reply = http.post("/v1/chat/completions", json=chat(stop_token_ids=[1 << 40]))
            assert reply.status_code == 400
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.said
        assert gone_within(processes, 2)
    finally:
        server.close()


def test_a_gateway_that_dies_ends_the_ranks_that_were_started_with_it(spoken_model):
    server = Server(
        *("--gateway", "smg", "--dtype", "float32", "--max-total-tokens", "4096"),
        *("--model", str(spoken_model)),
    )
    try:
        server.wait_ready()
        processes = server.ranks()
        gateway = next(one for one in processes if "smg" in one.name())
        gateway.kill()
        assert server.wait(30) == 1
        assert server.lines[-1].startswith("drumline: the gateway ended with status -9")
        assert gone_within(processes, 5)
    finally:
        server.close()
