"""What the HTTP side costs by itself, and whether it answers meanwhile: no model runs.

    python -m benchmarks.frontend [--json FILE] [--streams 256] [--rate 10000] [--seconds 5]
                                  [--api-server-count 1 ...] [--check]

This process plays the engine and the clients. As the engine it sends, of `--streams` streamed
completions, one token each a round, `--rate` tokens a second in all; as the clients it reads raw
sockets. The API server runs in processes of its own. Shown are the CPU time that these spend on
an event, how long a token takes from the engine's send to the client's read, and how long
`/health` takes: under that load, and while a prompt of a megabyte is tokenized besides.
`--check` fails where the bounds of the project are not kept.
"""

import argparse
import asyncio
import contextlib
import json
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import uvloop
import zmq

from benchmarks.report import machine, write
from drumline.client.engine_client import EngineClient
from drumline.core.config import Config, LogLevel, ModelConfig, ProcessConfig, ServerConfig
from drumline.core.model_files import find_model
from drumline.frontend.serve import SWITCH_S, listen_for, url_of
from drumline.frontend.service import Service
from drumline.frontend.text.load import load_tokenizer
from drumline.frontend.workers.hub import Hub
from drumline.launcher.front import Front, OneServer, SeveralServers
from drumline.launcher.workers import Workers
from drumline.wire.codec import encode
from drumline.wire.frames import Call, InputKind, decode_control, decode_generate, kind_of
from drumline.wire.handshake import (
    Greeting,
    Registration,
    declared_layouts,
    decode_init,
    identity_of,
)
from drumline.wire.output import BatchTokenIDOutSlim, ControlReplySlim

MOST_CPU_US, MOST_P99_MS, MOST_HEALTH_MS = 50.0, 20.0, 50.0
MARK = "~"
ASK_EVERY_S = 0.02
LOOK_S = 0.002
"""How long what the engine is asked may wait."""
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 23_302  # one megabyte
ROOM_TOKENS = 1 << 21


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=10_000.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--api-server-count", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--serve", type=int, metavar="WORKERS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return _serve(options.serve)
    rows = [_measured(options, count) for count in options.api_server_count]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    write({"benchmark": "frontend", "machine": machine(), "rows": rows}, options.json)
    kept = all(
        row["cpu_us_per_event"] <= MOST_CPU_US
        and row["p99_ms"] <= MOST_P99_MS
        and row["health_max_ms"] <= MOST_HEALTH_MS
        and row["health_max_ms_while_tokenizing"] <= MOST_HEALTH_MS
        for row in rows
    )
    return int(options.check and not kept)


# --- the API server, in its own process


def _serve(count: int) -> int:
    """Serve with `count` workers on a free port, until standard input ends.

    Prints the engine's address, MARK's token, and the URL once connections are answered.
    """
    config = Config(
        model=ModelConfig(model=str(find_model(None).path), served_model_name=("bench",)),
        server=ServerConfig(port=0, api_server_count=count),
        process=ProcessConfig(log_level=LogLevel.WARNING),
    )

    async def run() -> None:
        client = EngineClient()
        print(await client.bind(), flush=True)
        tokenizer = load_tokenizer(find_model(None))
        print(tokenizer.encode(MARK, add_special=False)[0], flush=True)
        registration = await client.ready(30)
        stop = asyncio.Event()
        reading = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        reading.add_done_callback(lambda _: stop.set())
        with contextlib.ExitStack() as closing:
            listeners = listen_for(config.server, count)
            for listener in listeners:
                closing.enter_context(listener)
            if count == 1:
                service = Service(config.server, ("bench",), client, registration, tokenizer)
                front: Front = OneServer(service, listeners[0])
            else:
                hub = Hub(client, "bench", None)
                workers = Workers(config, registration, hub, listeners)
                await workers.start(60)
                front = SeveralServers(hub, workers, url_of(listeners[0], config.server))
            await front.serve(stop, 1, lambda url: print(url, flush=True))
        await client.close()

    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    return 0


# --- the engine and the clients


class Engine:
    """An engine that says MARK to everybody, a token each a round."""

    def __init__(self, handshake: str, token: int) -> None:
        self._context = zmq.Context()
        self._token = token
        self.rids: list[str] = []
        self.sent: list[float] = []
        """When each round of the marks of all streams was sent."""
        greeting = self._socket(zmq.DEALER, handshake)
        greeting.send(encode(Greeting(status="HELLO")))
        addresses = decode_init(greeting.recv()).addresses
        greeting.send(encode(Greeting(status="READY")))
        self._inputs = self._socket(zmq.DEALER, addresses.inputs[0])
        self._inputs.send(
            encode(
                Registration(
                    max_model_len=ROOM_TOKENS, num_gpu_blocks=ROOM_TOKENS // 64,
                    prefix_granularity=64, dtype="float32", vllm_version="bench",
                    max_num_seqs=1024, instance_id="bench",
                    request_types=["add", "abort", "control"],
                    positional_layouts=declared_layouts(),
                )
            )
        )  # fmt: skip
        self._outputs = self._socket(zmq.PUSH, addresses.outputs[0])

    def take(self, most: int) -> None:
        """Take what was asked for, until `most` requests have come in all."""
        while len(self.rids) < most:
            frames = self._inputs.recv_multipart()
            if kind_of(frames) is InputKind.ADD:
                rid = decode_generate(frames[1]).rid
                assert isinstance(rid, str)
                self.rids.append(rid)
            else:
                self._answer(frames)

    def answer(self) -> None:
        """Answer what was asked meanwhile, such as how the engine gets on; know nothing of it."""
        while self._inputs.poll(0):
            self._answer(self._inputs.recv_multipart())

    def _answer(self, frames: list[bytes]) -> None:
        if kind_of(frames) is InputKind.CONTROL:
            call = decode_control(frames[1])
            assert isinstance(call, Call)
            reply = ControlReplySlim(call_id=call.call_id, success=False, message="unknown")
            self._outputs.send(encode(reply))

    def step(self, completed: int) -> None:
        rows = len(self.rids)
        self.sent.append(time.perf_counter())
        self._outputs.send(
            encode(
                BatchTokenIDOutSlim(
                    rids=self.rids, output_ids=[[self._token]] * rows,
                    finished_reasons=[""] * rows, prompt_tokens=[4] * rows,
                    completion_tokens=[completed] * rows, cached_tokens=[0] * rows,
                    output_token_logprobs_val=[[]] * rows,
                    output_token_logprobs_idx=[[]] * rows,
                    num_running=rows, kv_active_pages=rows, kv_total_pages=ROOM_TOKENS // 64,
                )
            )
        )  # fmt: skip

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        one = self._context.socket(kind)
        one.set_hwm(0)
        one.linger = 100
        if kind == zmq.DEALER:
            one.identity = identity_of(0)
        one.connect(address)
        return one

    def close(self) -> None:
        self._context.destroy(100)


class _Stream:
    """A connection, and how many marks came of it; the probe's has -1."""

    __slots__ = ("_socket", "receive", "seen")

    def __init__(self, one: socket.socket, seen: int) -> None:
        self._socket = one
        self.receive = one.recv
        self.seen = seen


class Clients:
    """Streams read from raw sockets, and one connection that asks for `/health`."""

    def __init__(self, url: str, streams: int, engine: Engine) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = (host, int(port))
        self._engine = engine
        self._poll = select.epoll()
        self._streams: dict[int, _Stream] = {}
        self.late: list[float] = []
        self.events = 0
        self.health: list[float] = []
        self._asked_at = self._next_ask = 0.0
        self._probe = self._watched(self._connected(), -1)
        for index in range(streams):
            one = self._connected()
            one.sendall(self._request({"prompt": [1, 2, 3, 4], "max_tokens": 100_000,
                                       "stream": True, "ignore_eos": True}))  # fmt: skip
            engine.take(index + 1)
            self._watched(one, 0)

    def ask(self, body: dict[str, object]) -> socket.socket:
        """Send a completion request and return its connection, unread."""
        one = self._connected()
        one.setblocking(True)
        one.sendall(self._request(body))
        return one

    def read(self, until: float) -> None:
        """Read whatever comes until the clock shows `until`, and what is there by then."""
        sent, mark = self._engine.sent, MARK.encode()
        while True:
            if not self._asked_at and time.perf_counter() >= self._next_ask:
                self._next_ask = time.perf_counter() + ASK_EVERY_S
                self._probe.sendall(b"GET /health HTTP/1.1\r\nhost: bench\r\n\r\n")
                self._asked_at = time.perf_counter()
            self._engine.answer()
            left = until - time.perf_counter()
            for fd, _ in self._poll.poll(min(max(left, 0), LOOK_S)):
                stream = self._streams[fd]
                data = stream.receive(1 << 16)
                now = time.perf_counter()
                if stream.seen < 0:
                    if data.endswith(b"}"):
                        self.health.append(now - self._asked_at)
                        self._asked_at = 0.0
                    continue
                count = data.count(mark)
                seen = stream.seen
                stream.seen += count
                self.events += data.count(b"data: ")
                self.late += [now - at for at in sent[seen : seen + count]]
            if left <= 0:
                return

    def _watched(self, one: socket.socket, seen: int) -> socket.socket:
        self._streams[one.fileno()] = _Stream(one, seen)
        self._poll.register(one.fileno(), select.EPOLLIN)
        return one

    def _connected(self) -> socket.socket:
        one = socket.create_connection(self._address)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return one

    @staticmethod
    def _request(body: dict[str, object]) -> bytes:
        data = json.dumps(body).encode()
        return (
            b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)
        )


def _measured(options: argparse.Namespace, workers: int) -> dict[str, float]:
    with _server(workers) as (process, engine, url):
        clients = Clients(url, options.streams, engine)
        every_s = options.streams / options.rate
        _rounds(clients, engine, every_s, 1.0)
        for figures in (clients.late, clients.health):
            figures.clear()
        clients.events = 0
        owner, *others = _processes(process)
        before = [_cpu_s(one) for one in (owner, *others)]
        began = time.perf_counter()
        _rounds(clients, engine, every_s, options.seconds)
        seconds = time.perf_counter() - began
        spent = [_cpu_s(one) - was for one, was in zip((owner, *others), before, strict=True)]
        health = list(clients.health)
        row = {
            "api_servers": workers,
            "streams": options.streams,
            "events_per_s": round(clients.events / seconds),
            "cpu_us_per_event": round(1e6 * sum(spent) / clients.events, 1),
            "owner_cpu_us_per_event": round(1e6 * spent[0] / clients.events, 1),
            "p50_ms": _ms(clients.late, 0.5),
            "p99_ms": _ms(clients.late, 0.99),
            "health_p99_ms": _ms(health, 0.99),
            "health_max_ms": round(1e3 * max(health), 1),
        }
        clients.health.clear()
        with clients.ask({"prompt": LONG_PROMPT, "max_tokens": 1}):
            _rounds(clients, engine, every_s, 2.0)
        row["health_max_ms_while_tokenizing"] = round(1e3 * max(clients.health), 1)
        return row


def _rounds(clients: Clients, engine: Engine, every_s: float, seconds: float) -> None:
    due = time.perf_counter()
    until = due + seconds
    while due < until:
        engine.step(len(engine.sent) + 1)
        due += every_s
        clients.read(due)
    clients.read(time.perf_counter() + 0.1)


@contextlib.contextmanager
def _server(workers: int) -> Iterator[tuple[psutil.Process, Engine, str]]:
    command = [sys.executable, "-m", "benchmarks.frontend", "--serve", str(workers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as api:
        assert api.stdout is not None
        assert api.stdin is not None
        engine = Engine(api.stdout.readline().strip(), int(api.stdout.readline()))
        try:
            yield psutil.Process(api.pid), engine, api.stdout.readline().strip()
        finally:
            engine.close()
            api.stdin.close()
            try:
                api.wait(10)
            except subprocess.TimeoutExpired:
                api.kill()


def _processes(api: psutil.Process) -> list[psutil.Process]:
    return [api, *api.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _ms(values: list[float], share: float) -> float:
    return round(1e3 * statistics.quantiles(values, n=1000)[round(1000 * share) - 1], 2)


if __name__ == "__main__":
    sys.exit(main())
