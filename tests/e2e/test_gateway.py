"""The TokenSpeed gateway drives the engine's link: a black box that speaks the wire.

Needs the PyPI package `tokenspeed-smg`, which the project does not install; without
it these tests are skipped. `pip install tokenspeed-smg==1.13.0.post20261027` brings it.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.e2e.gateways import TEMPLATE, byte_tokenizer, free_port, needs_smg
from tests.fakes.engine import registration

from drumline.contract.messages import AbortAsked, CallAsked, CallReply, Submitted
from drumline.contract.outputs import Load, OutputColumns
from drumline.control.transport import Transport

pytestmark = needs_smg

START_S = 60
ANSWER = "Hello, gateway"
LOAD = Load(num_running=1, num_waiting=0, kv_active_pages=1, kv_total_pages=512)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


class Engine:
    """The engine's link with a loop that answers everything with ANSWER, then waits."""

    def __init__(self, address, tokenizer):
        self.link = Transport(address, registration(max_model_len=512))
        self.answer = tokenizer.encode(ANSWER).ids
        self.requests = []
        self.aborted = []
        self.calls = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self.link.start()
        self._thread.start()

    def _main(self):
        while not self._over.is_set():
            for message in self.link.receive(0.02):
                match message:
                    case Submitted(request):
                        self.requests.append(request)
                        self._answer(request)
                    case AbortAsked(rids):
                        self.aborted += rids
                    case CallAsked(call_id, method):
                        self.calls.append(method)
                        self.link.reply(CallReply(call_id, success=True, message="done"))
            self.link.send(OutputColumns(), LOAD)

    def _answer(self, request):
        fault = request.invalid
        if request.grammar is not None:
            fault = f"no {request.grammar.kind.value} here"
        if fault is not None:
            self._row(request, [], "abort", 0, {"message": fault, "status_code": 400})
            return
        endless = request.max_new_tokens == 100
        for sent, token in enumerate(self.answer, start=1):
            last = sent == len(self.answer) and not endless
            self._row(request, [token], "stop" if last else "", sent)

    def _row(self, request, ids, reason, sent, details=None):
        asked = request.return_logprob
        top = request.top_logprobs
        self.link.send(
            OutputColumns(
                rids=[request.rid],
                output_ids=[ids],
                finished_reasons=[reason],
                prompt_tokens=[len(request.input_ids)],
                completion_tokens=[sent],
                cached_tokens=[0],
                logprobs=[[-0.5] * len(ids) if asked else []],
                logprob_ids=[ids if asked else []],
                top_logprobs=[[[-0.5 - k for k in range(top)] for _ in ids] if asked else []],
                top_logprob_ids=[[[i + k for k in range(top)] for i in ids] if asked else []],
                details=[details],
            ),
            LOAD,
        )

    def close(self):
        self._over.set()
        self._thread.join(5)
        self.link.close()


@pytest.fixture(scope="module")
def gateway(tokenizer, tmp_path_factory):
    """A gateway that serves the engine: its address, and the engine."""
    folder = tmp_path_factory.mktemp("gateway")
    model = folder / "tiny"
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"})
    )
    (model / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    port, wire = free_port(), free_port()
    log = (folder / "gateway.log").open("wb")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "smg", "launch"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
            *("--worker-urls", f"tcp://127.0.0.1:{wire}", "--backend", "tokenspeed"),
            *("--model-path", model.name, "--policy", "passthrough"),
            *("--disable-retries", "--disable-circuit-breaker"),
        ],
        cwd=folder,  # the gateway serves the model under the path it was given
        stdout=log,
        stderr=subprocess.STDOUT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    engine = None
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            engine = Engine(f"tcp://127.0.0.1:{wire}", tokenizer)
            _wait_until(
                lambda: http.post("/v1/chat/completions", json=chat()),
                process,
                folder / "gateway.log",
            )
            yield http, engine
    finally:
        process.kill()
        process.wait(20)
        if engine is not None:
            engine.close()
        log.close()


def _wait_until(answered, process, log: Path):
    """Wait until a request is answered with 200."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if answered().status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"the gateway did not come up:\n{log.read_text()[-4000:]}")


def chat(**changes):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 40,
    }
    return body | changes


def test_a_chat_answer_comes_through(gateway):
    http, engine = gateway
    reply = http.post("/v1/chat/completions", json=chat(temperature=0.0)).json()
    assert reply["choices"][0]["message"]["content"] == ANSWER
    assert reply["choices"][0]["finish_reason"] == "stop"
    prompt = len(engine.requests[-1].input_ids)
    assert reply["usage"]["prompt_tokens"] == prompt == len("user: Hi\nassistant:")
    assert reply["usage"]["completion_tokens"] == len(engine.answer)
    assert engine.requests[-1].sampling.greedy


def test_a_streamed_answer_comes_through(gateway):
    http, _ = gateway
    text = ""
    with http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    assert text == ANSWER


def test_top_log_probabilities_come_through_by_their_declared_names(gateway):
    http, engine = gateway
    body = chat(logprobs=True, top_logprobs=2)
    reply = http.post("/v1/chat/completions", json=body).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == len(engine.answer)
    assert content[0]["logprob"] == -0.5
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.5, -1.5]


def test_a_refusal_keeps_its_status_and_reason(gateway):
    http, _ = gateway
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    reply = http.post("/v1/chat/completions", json=chat(response_format=schema))
    assert reply.status_code == 400
    assert "no json_schema here" in reply.text


def test_a_client_that_leaves_is_an_abort(gateway):
    http, engine = gateway
    with http.stream(
        "POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=100)
    ) as reply:
        next(reply.iter_lines())
    deadline = time.monotonic() + 10
    while engine.requests[-1].rid not in engine.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.requests[-1].rid in engine.aborted


def test_a_control_operation_is_a_call(gateway):
    http, engine = gateway
    reply = http.post("/flush_cache")
    assert reply.status_code == 200
    assert engine.calls == ["flush_cache"]
