"""A scripted engine over real sockets: it speaks the wire and computes nothing.

Its thread dials a frontend, registers, and answers every request with what the
script returns, one token a step. Tests of frontends drive it:

    with FakeEngine(address, script=lambda request: [7, 8, 9]) as engine:
        ...
"""

import itertools
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import zmq

from drumline.wire.codec import encode
from drumline.wire.frames import InputKind, decode_control, decode_generate, decode_rids, kind_of
from drumline.wire.handshake import (
    Greeting,
    Registration,
    declared_layouts,
    decode_init,
    identity_of,
)
from drumline.wire.output import ENGINE_CORE_DEAD, BatchTokenIDOutSlim, ControlReplySlim
from drumline.wire.progress import PROGRESS, Progress, encode_progress
from drumline.wire.request import TokenizedGenerateReqInput

Script = Callable[[TokenizedGenerateReqInput], Iterable[int]]
POLL_MS = 2


def echo(request: TokenizedGenerateReqInput) -> Iterable[int]:
    """Answer a prompt with itself."""
    return request.input_ids or []


def registration(**changes) -> Registration:
    """Return the registration of a small engine."""
    fields = {
        "max_model_len": 2048,
        "num_gpu_blocks": 512,
        "prefix_granularity": 64,
        "dtype": "float32",
        "vllm_version": "tokenspeed-fake",
        "max_num_seqs": 64,
        "instance_id": "fake",
        "device_backend": "fake kernels",
        "device": "fake device",
        "kv_cache_dtype": "int8",
        "request_types": ["add", "abort", "control"],
        "positional_layouts": declared_layouts(),
    }
    return Registration(**(fields | changes))


class _Running:
    def __init__(self, request, tokens: Iterator[int]) -> None:
        self.request = request
        self.tokens = tokens
        self.sent = 0

    def ends(self) -> bool:
        """Whether nothing follows the token just taken."""
        following = next(self.tokens, None)
        if following is None:
            return True
        self.tokens = itertools.chain([following], self.tokens)
        return False


def _prompts_told(rows) -> dict:
    """Return the columns that tell of prompts, each with its request's first token."""
    columns = {"token_logprobs_val": [], "token_logprobs_idx": [], "top_logprobs_val": [],
               "top_logprobs_idx": []}  # fmt: skip
    for request, sent, ids, *_ in rows:
        told = request.return_logprob and request.logprob_start_len == 0 and sent == len(ids) == 1
        prompt = request.input_ids if told else []
        likely = range(request.top_logprobs_num)
        columns["token_logprobs_val"].append([None if i == 0 else -1.0 for i in range(len(prompt))])
        columns["token_logprobs_idx"].append(list(prompt))
        named = request.token_ids_logprob or []
        beside = [-1.0 - k for k in likely] + [-9.0] * len(named)
        columns["top_logprobs_val"].append([beside for _ in prompt])
        columns["top_logprobs_idx"].append([[id_ + k for k in likely] + named for id_ in prompt])
    return {f"input_{name}": column for name, column in columns.items()}


class FakeEngine:
    """An engine that says what `script` tells it to.

    `script` maps a request to its answer's token ids; the answer ends with reason
    `stop`, or with `length` at the request's `max_new_tokens`. A step makes
    one token for every running request and takes at least `step_s`. While `held` is
    set it takes requests but makes no step. `on_call` maps a method and its arguments
    to success and message; None for no answer at all. `refuse` maps a request to the
    details of an abort, or None. `cached_tokens` is what every request reports.
    With `reason_rides` an answer's last token comes with its reason instead of before it.
    `others` is what it reports besides its own: requests that run and that wait, and pages.
    With `embeds` it makes up vectors of three numbers for prompts that are to become some.
    While `lost` is set not even its link says where it is.
    While `mute` is set it sends no report of its own accord.
    `requests`, `aborted` and `calls` say what arrived, in order.
    """

    def __init__(
        self,
        handshake: str,
        *,
        index: int = 0,
        script: Script = echo,
        step_s: float = 0.0,
        refuse: Callable[[TokenizedGenerateReqInput], dict | None] = lambda request: None,
        on_call: Callable[..., tuple[bool, str] | None] = lambda method, *args: (True, ""),
        cached_tokens: int = 0,
        reason_rides: bool = False,
        report_s: float = 1.0,
        registers: Registration | None = None,
        embeds: bool = True,
    ) -> None:
        self.handshake = handshake
        self.index = index
        self.script = script
        self.step_s = step_s
        self.refuse = refuse
        self.on_call = on_call
        self.cached_tokens = cached_tokens
        self.reason_rides = reason_rides
        self.report_s = report_s
        self.registers = registers or registration()
        self.embeds = embeds
        self.others = (0, 0, 0)
        self.held = threading.Event()
        self.lost = False
        self.mute = threading.Event()
        self.requests: list[TokenizedGenerateReqInput] = []
        self.aborted: list[str] = []
        self.calls: list[tuple] = []
        self.registered = threading.Event()
        self.failure: BaseException | None = None
        self._running: dict[str, _Running] = {}
        self._raw: list[bytes] = []
        self._sockets: list[zmq.Socket] = []
        self._stop = threading.Event()
        self._sentinel = True
        self._thread = threading.Thread(target=self._main, name="fake-engine", daemon=True)

    def start(self) -> "FakeEngine":
        self._thread.start()
        return self

    def close(self, sentinel: bool = True) -> None:
        """Stop; without `sentinel` the connection just ends, as if the process was killed."""
        self._sentinel = sentinel
        self._stop.set()
        self._thread.join(10)
        if self.failure is not None:
            raise self.failure

    def send_raw(self, payload: bytes) -> None:
        """Put bytes on the output socket, whatever they are."""
        self._raw.append(payload)

    def __enter__(self) -> "FakeEngine":
        return self.start()

    def __exit__(self, *error) -> None:
        self.close()

    def _main(self) -> None:
        context = zmq.Context()
        try:
            self._serve(context)
        except BaseException as error:  # the test that closes the engine sees it
            self.failure = error
        finally:
            for socket in self._sockets:
                socket.close(100)
            context.term()

    def _socket(self, context, kind, address) -> zmq.Socket:
        socket = context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(0)
        if kind == zmq.DEALER:
            socket.identity = identity_of(self.index)
        socket.connect(address)
        return socket

    def _serve(self, context) -> None:
        handshake = self._socket(context, zmq.DEALER, self.handshake)
        handshake.send(encode(Greeting(status="HELLO")))
        while not handshake.poll(50):
            if self._stop.is_set():
                return
        addresses = decode_init(handshake.recv()).addresses
        handshake.send(encode(Greeting(status="READY")))
        requests = self._socket(context, zmq.DEALER, addresses.inputs[0])
        requests.send(encode(self.registers))
        outputs = self._socket(context, zmq.PUSH, addresses.outputs[0])
        handshake.close(500)
        self.registered.set()
        self._report(outputs, [])
        reported = time.monotonic()
        while not self._stop.is_set():
            busy = self._running and not self.held.is_set()
            if requests.poll(0 if busy else POLL_MS):
                while requests.poll(0):
                    self._take(requests.recv_multipart(), outputs)
            while self._raw:
                outputs.send(self._raw.pop(0))
            if self._running and not self.held.is_set():
                self._step(outputs)
                reported = time.monotonic()
                time.sleep(self.step_s)
            elif time.monotonic() - reported > self.report_s and not self.mute.is_set():
                self._report(outputs, [])
                reported = time.monotonic()
        if self._sentinel:
            outputs.send(ENGINE_CORE_DEAD)

    def _take(self, frames, outputs) -> None:
        match kind_of(frames):
            case InputKind.ADD:
                request = decode_generate(frames[1])
                self.requests.append(request)
                details = self.refuse(request)
                if details is not None:
                    self._report(outputs, [(request, 0, [], "abort", details)])
                else:
                    self._running[request.rid] = _Running(request, iter(self.script(request)))
            case InputKind.ABORT:
                for rid in decode_rids(frames[1]):
                    self.aborted.append(rid)
                    ended = self._running.pop(rid, None)
                    if ended is not None:
                        self._report(outputs, [(ended.request, ended.sent, [], "abort", None)])
            case InputKind.CONTROL:
                call = decode_control(frames[1])
                if call.method == PROGRESS:
                    # A link's own answer, which no loop hears of.
                    answer = None if self.lost else (True, encode_progress(Progress(7, 1.5)))
                else:
                    self.calls.append((call.method, *call.args))
                    answer = self.on_call(call.method, *call.args)
                if answer is not None:
                    reply = ControlReplySlim(
                        call_id=call.call_id,
                        success=answer[0],
                        message=answer[1],
                        engine_index=self.index,
                    )
                    outputs.send(encode(reply))

    def _step(self, outputs) -> None:
        rows = []
        for rid, running in list(self._running.items()):
            limit = running.request.sampling_params.max_new_tokens
            token = None if running.sent == limit else next(running.tokens, None)
            reason = ""
            if token is None:
                reason = "length" if running.sent == limit else "stop"
            elif self.reason_rides and running.ends():
                running.sent += 1
                reason = "stop"
            else:
                running.sent += 1
                if running.sent == limit:
                    reason = "length"
            rows.append(
                (
                    running.request,
                    running.sent,
                    [] if token is None else [token],
                    reason,
                    self._vector(running.request) if reason else None,
                )
            )
            if reason:
                del self._running[rid]
        self._report(outputs, rows)

    def _vector(self, request) -> dict | None:
        """Return a vector: of the prompt's length, its last token, and 1."""
        own = (request.sampling_params.custom_params or {}).get("drumline", {})
        if not self.embeds or "embed" not in own:
            return None
        ids = request.input_ids
        return {"type": "length", "embedding": struct.pack("<3f", len(ids), ids[-1], 1)}

    def _report(self, outputs, rows) -> None:
        wanted = [request.return_logprob for request, *_ in rows]
        running, waiting, pages = self.others
        outputs.send(
            encode(
                BatchTokenIDOutSlim(
                    rids=[request.rid for request, *_ in rows],
                    output_ids=[ids for _, _, ids, _, _ in rows],
                    finished_reasons=[reason for _, _, _, reason, _ in rows],
                    prompt_tokens=[len(request.input_ids or []) for request, *_ in rows],
                    completion_tokens=[sent for _, sent, *_ in rows],
                    cached_tokens=[self.cached_tokens for _ in rows],
                    output_token_logprobs_val=[
                        [-0.5] * len(row[2]) if asked else []
                        for row, asked in zip(rows, wanted, strict=True)
                    ],
                    output_token_logprobs_idx=[
                        row[2] if asked else [] for row, asked in zip(rows, wanted, strict=True)
                    ],
                    engine_index=self.index,
                    num_running=len(self._running) + running,
                    num_waiting=waiting,
                    kv_active_pages=len(self._running) + pages,
                    kv_total_pages=self.registers.num_gpu_blocks,
                    finish_reason_details=[details for *_, details in rows],
                    **_prompts_told(rows),
                    output_top_logprobs_val=[
                        [
                            [
                                *(-0.5 - k for k in range(row[0].top_logprobs_num)),
                                *(-8.0 for _ in row[0].token_ids_logprob or ()),
                            ]
                            for _ in row[2]
                        ]
                        if asked
                        else []
                        for row, asked in zip(rows, wanted, strict=True)
                    ],
                    output_top_logprobs_idx=[
                        [
                            [
                                *(token + k for k in range(row[0].top_logprobs_num)),
                                *(row[0].token_ids_logprob or ()),
                            ]
                            for token in row[2]
                        ]
                        if asked
                        else []
                        for row, asked in zip(rows, wanted, strict=True)
                    ],
                )
            )
        )
