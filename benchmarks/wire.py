"""CPU time of the frontend wire: a batch's encoding and decoding, and the client's streams.

    python -m benchmarks.wire [--json FILE] [--rows 1 16 64 256 1024] [--batches 200]

A batch has one token a row. `encode` starts at a round's columns and `decode` ends at
a batch of the wire; `cut` is the client's part that hands the rows to their streams,
while nobody fetches them. `event` is all that the client's event loop spends on one
token of one stream over a loopback socket: receiving, decoding, cutting, and waking
a consumer that takes the token; ZMQ's own I/O thread is not in it. `intake` is what
the engine's link spends on one arriving request with a prompt of 512 tokens, its page
digests included.
"""

import argparse
import asyncio
import sys
import threading
import time
from pathlib import Path

import zmq

from benchmarks.report import machine, write
from drumline.client.engine_client import EngineClient
from drumline.contract.outputs import Load, OutputColumns
from drumline.control.transport.intake import submitted
from drumline.control.transport.outgoing import slim
from drumline.wire.codec import encode
from drumline.wire.handshake import (
    Greeting,
    Registration,
    declared_layouts,
    decode_init,
    identity_of,
)
from drumline.wire.layout import decode_output
from drumline.wire.output import BatchTokenIDOutSlim
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams

LOAD = Load(num_running=256, num_waiting=3, kv_active_pages=1000, kv_total_pages=4000)
PROMPT = 512
GRANULARITY = 64


def rid(row):
    return f"chatcmpl-{row:032x}"


def columns(rows):
    """One round's outputs, one token a row."""
    return OutputColumns(
        rids=[rid(row) for row in range(rows)],
        output_ids=[[1000 + row] for row in range(rows)],
        finished_reasons=[""] * rows,
        prompt_tokens=[PROMPT] * rows,
        completion_tokens=[77] * rows,
        cached_tokens=[0] * rows,
        details=[None] * rows,
    )


def request(row):
    return TokenizedGenerateReqInput(
        rid=rid(row),
        input_ids=[(row * 31 + n) % 40_000 for n in range(PROMPT)],
        sampling_params=SamplingParams(max_new_tokens=64, temperature=0.7),
        stream=True,
    )


def median_us(work, batches):
    """Return the median over chunks of µs of this thread's CPU for a call of `work`."""
    chunk = max(batches // 10, 1)
    figures = []
    for _ in range(0, batches, chunk):
        started = time.thread_time_ns()
        for _ in range(chunk):
            work()
        figures.append((time.thread_time_ns() - started) / chunk / 1000)
    return sorted(figures)[len(figures) // 2]


class Engine:
    """The other end of a client: registers, then puts out a batch whenever told."""

    def __init__(self, address, payload):
        self._address = address
        self._payload = payload
        self._turns = threading.Semaphore(0)
        self._over = False
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def next(self):
        self._turns.release()

    def close(self):
        self._over = True
        self._turns.release()
        self._thread.join()

    def _main(self):
        context = zmq.Context()
        handshake, requests, outputs = (
            context.socket(kind) for kind in (zmq.DEALER, zmq.DEALER, zmq.PUSH)
        )
        handshake.identity = requests.identity = identity_of(0)
        handshake.connect(self._address)
        handshake.send(encode(Greeting(status="HELLO")))
        addresses = decode_init(handshake.recv()).addresses
        requests.connect(addresses.inputs[0])
        registration = Registration(
            max_model_len=4096,
            num_gpu_blocks=4000,
            prefix_granularity=GRANULARITY,
            dtype="float32",
            request_types=["add", "abort", "control"],
            positional_layouts=declared_layouts(),
        )
        requests.send(encode(registration))
        outputs.connect(addresses.outputs[0])
        while self._turns.acquire() and not self._over:
            outputs.send(self._payload)
        for socket in (handshake, requests, outputs):
            socket.close(0)
        context.term()


async def client_figures(rows, batches):
    """Return µs to cut a batch, and µs of the event loop for one token of one stream."""
    client = EngineClient()
    payload = encode(slim(columns(rows), LOAD, 0))
    engine = Engine(await client.bind(), payload)
    await client.ready(30)
    streams = [client.submit(request(row)) for row in range(rows)]
    # Streams keep a batch's lists, so each batch is cut once.
    fresh = iter([decode_output(payload) for _ in range(batches + 10)])

    def cut():
        batch = next(fresh)
        assert isinstance(batch, BatchTokenIDOutSlim)
        client._cut(batch)  # the part alone has no other door

    cut_us = median_us(cut, batches)

    taken = 0
    everyone = asyncio.Event()

    async def consume(stream):
        nonlocal taken
        async for _ in stream:
            taken += 1
            if taken == rows:
                everyone.set()

    consumers = [asyncio.create_task(consume(stream)) for stream in streams]
    await everyone.wait()  # for what `cut` left behind
    figures = []
    for _ in range(batches):
        taken = 0
        everyone.clear()
        started = time.thread_time_ns()
        engine.next()
        await everyone.wait()
        figures.append((time.thread_time_ns() - started) / rows / 1000)
    for consumer in consumers:
        consumer.cancel()
    await client.close()
    engine.close()
    figures.sort()
    return cut_us, figures[len(figures) // 2]


def measure(rows, batches):
    outputs = columns(rows)
    payload = encode(slim(outputs, LOAD, 0))
    cut_us, event_us = asyncio.run(client_figures(rows, batches))
    return {
        "rows": rows,
        "bytes": len(payload),
        "encode_us": round(median_us(lambda: encode(slim(outputs, LOAD, 0)), batches), 1),
        "decode_us": round(median_us(lambda: decode_output(payload), batches), 1),
        "cut_us": round(cut_us, 1),
        "event_us": round(event_us, 2),
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--batches", type=int, default=200)
    options = parser.parse_args(argv)
    added = encode(request(1))
    intake_us = median_us(lambda: submitted(added, GRANULARITY), options.batches)
    report = {
        "benchmark": "wire",
        "unit": "µs of CPU: per batch, per event (one token of one stream), per request",
        "machine": machine("msgspec", "pyzmq"),
        "intake_us": round(intake_us, 1),
        "results": [],
    }
    print(f"{'rows':>6}{'bytes':>8}{'encode':>9}{'decode':>9}{'cut':>9}{'event':>8}")
    for rows in options.rows:
        result = measure(rows, options.batches)
        report["results"].append(result)
        print(
            f"{rows:>6}{result['bytes']:>8}{result['encode_us']:>9}{result['decode_us']:>9}"
            f"{result['cut_us']:>9}{result['event_us']:>8}",
            flush=True,
        )
    print(f"a request of {PROMPT} tokens arriving: {report['intake_us']} µs")
    write(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
