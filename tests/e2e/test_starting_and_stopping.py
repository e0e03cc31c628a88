"""How a server starts, refuses to start, drains, and dies: always whole, with the right status."""

import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest
from tests.e2e.processes import START_S, Server, eventually, gone_within, run
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from drumline.core.model_files import find_model

STORY = {"messages": [{"role": "user", "content": "Tell a long story."}], "temperature": 0}


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    server = Server("--max-total-tokens", "4096", *flags)
    try:
        yield server.wait_ready()
    finally:
        server.close()


class Stream(threading.Thread):
    """A client that reads a streamed answer; `begun` once a token came."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.url = f"{server.url}/v1/chat/completions"
        self.body = STORY | {"stream": True, "max_tokens": max_tokens}
        self.lines: list[str] = []
        self.error: Exception | None = None
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(60)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=60) as reply:
                for line in reply.iter_lines():
                    if line:
                        self.lines.append(line)
                    if len(self.lines) > 3:
                        self.begun.set()
        except httpx.HTTPError as error:
            self.error = error

    def ended(self) -> list[str]:
        self.join(60)
        assert not self.is_alive()
        return self.lines


def test_a_drain_finishes_what_runs_refuses_what_comes_and_ends_with_0():
    with serving() as server:
        stream = Stream(server, 60)
        ranks = server.ranks()
        server.signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{server.url}/health").json()["status"] == "draining")
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=STORY)
        assert refused.status_code == 503
        lines = stream.ended()
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in "".join(lines)
        assert server.wait() == 0
        assert gone_within(ranks, 2)


def test_a_drain_is_bounded_and_tells_who_is_broken_off():
    with serving("--drain-timeout", "0.5") as server:
        stream = Stream(server, 3000)
        server.signal(signal.SIGINT)
        assert server.wait(15) == 0
        assert "error" in "".join(stream.ended()[-2:])


def test_a_second_signal_stops_at_once_with_its_number():
    with serving() as server:
        Stream(server, 3000)
        ranks = server.ranks()
        server.signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{server.url}/health").json()["status"] == "draining")
        began = time.perf_counter()
        server.signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT
        assert time.perf_counter() - began < 5
        assert gone_within(ranks, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_all_of_it_at_once_with_its_number(number):
    server = Server()
    try:
        eventually(lambda: any("rank 0" in line for line in server.lines), START_S)
        ranks = server.ranks()
        began = time.perf_counter()
        server.signal(number)
        assert server.wait() == 128 + number
        assert time.perf_counter() - began < 15, "half of what a drain may take"
        assert gone_within(ranks, 2)
        assert "Traceback" not in server.said
        assert "killing" not in server.said
    finally:
        server.close()


def test_a_killed_rank_ends_the_server_with_1_and_its_clients_with_an_error():
    with serving() as server:
        stream = Stream(server, 3000)
        server.ranks()[0].kill()
        assert server.wait(15) == 1
        assert "error" in "".join(stream.ended()[-2:])
        assert server.lines[-1].startswith("drumline: rank 0 was killed by SIGKILL while serving")
        assert "Traceback" not in server.said


def test_a_killed_server_takes_its_ranks_with_it_and_all_have_names():
    with serving() as server:
        Stream(server, 3000)
        ranks = server.ranks()
        assert [rank.cmdline()[0] for rank in ranks] == ["drumline::rank0"]
        assert psutil.Process(server.process.pid).cmdline()[0] == "drumline::serve"
        server.process.kill()
        assert gone_within(ranks, 2)


def test_a_prompt_that_the_pool_cannot_hold_is_refused_with_both_numbers():
    with serving("--max-total-tokens", "256") as server:
        body = {"prompt": [100] * 500, "max_tokens": 4}
        reply = httpx.post(f"{server.url}/v1/completions", json=body)
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert "has 500 tokens" in message
        holds = re.search(r"holds (\d+) tokens", message)
        assert holds is not None
        assert 200 < int(holds[1]) <= 256
        fits = httpx.post(f"{server.url}/v1/completions", json=body | {"prompt": [100] * 200})
        assert fits.status_code == 200


def test_a_port_in_use_is_noticed_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = run("serve", "--port", str(port))
    assert refused.status == 2
    assert refused.err.startswith("drumline: --port: ")
    assert str(port) in refused.err
    assert "choose another port" in refused.err
    assert refused.err.count("\n") == 1
    assert "rank 0" not in refused.out


def test_what_the_operator_can_mend_is_one_line_and_status_2(tmp_path):
    whole = find_model(None).path.read_bytes()
    headless = tmp_path / "headless.gguf"
    headless.write_bytes(whole[:5000])
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    tokenizer = Tokenizer(WordLevel({"a": 0}, "a"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(strange / "tokenizer.json"))
    for arguments, told in (
        (["/nowhere/model"], "--model: '/nowhere/model' is no existing directory or file"),
        ([str(headless)], "truncated"),
        ([str(cut)], "truncated"),
        ([str(text)], "is no GGUF file"),
        ([str(strange)], "Mamba"),
        (["--max-model-len", "100000"], "--max-model-len: 100000 is beyond the model's context"),
        (["--prefix-granularity", "10"], "--prefix-granularity: 10 is no multiple"),
        (["--kv-cache-size", "lots"], "--kv-cache-size: 'lots' is no size"),
        (["--max-num-seqz", "4"], "did you mean --max-num-seqs"),
    ):
        refused = run("serve", "--port", "0", *arguments)
        assert refused.status == 2, (arguments, refused)
        assert told in refused.err, (arguments, refused)
        lines = [line for line in refused.err.splitlines() if " INFO " not in line]
        assert len(lines) == 1, (arguments, refused)
        assert lines[0].startswith("drumline: "), (arguments, refused)


def test_a_slow_start_is_given_up_by_rank_and_step():
    refused = run("serve", "--port", "0", "--startup-timeout", "0.7")
    assert refused.status == 1
    assert "rank 0 is not ready after 0.7 s, it is at '" in refused.err
