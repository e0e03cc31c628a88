"""The client of servers: what it takes out of their streams, and how it says what went wrong."""

import asyncio
import json

import gguf
import numpy as np
import pytest
from benchmarks.peers.engine import PeerFailed
from benchmarks.peers.llama_cpp import DIALECT as LLAMA_CPP
from benchmarks.peers.models import write_as
from benchmarks.peers.served import asked, openai_dialect
from benchmarks.peers.work import Work

OPENAI = openai_dialect("m")


def usage(tokens):
    return {"choices": [{"text": "x"}], "usage": {"completion_tokens": tokens}}


async def talked(events, dialect, work, status=200):
    """Ask a server that answers everything with `events`, in chunks as servers send them."""
    heard = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        heard.append(json.loads(await reader.readexactly(length)))
        writer.write(f"HTTP/1.1 {status} Said\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for event in events:
            data = b"data: " + json.dumps(event).encode() + b"\n\n"
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await asked(port, dialect, work), heard


def ask(*arguments, **more):
    return asyncio.run(talked(*arguments, **more))


def test_a_stream_is_counted_by_its_usage():
    work = Work("x", [[5, 6]], [3], [0.0])
    answers, heard = ask([usage(1), usage(3), {"choices": [], "usage": None}], OPENAI, work)
    assert answers[0].counts == [1, 3]
    assert answers[0].began < answers[0].stamps[0] <= answers[0].stamps[1]
    assert heard[0]["prompt"] == [5, 6]
    assert (heard[0]["max_tokens"], heard[0]["ignore_eos"]) == (3, True)


def test_llama_cpp_tells_tokens_and_its_own_time():
    events = [
        {"tokens_predicted": 1, "stop": False},
        {"tokens_predicted": 3, "stop": False},
        {
            "tokens_predicted": 4,
            "stop": True,
            "timings": {"predicted_n": 4, "predicted_ms": 50.0},
        },
    ]
    answers, heard = ask(events, LLAMA_CPP, Work("x", [[5]], [4], [0.0]))
    assert answers[0].counts == [1, 3, 4]
    assert answers[0].decode_s == 0.05
    assert heard[0]["n_predict"] == 4


def test_requests_wait_for_their_time():
    work = Work("x", [[5], [5]], [1, 1], [0.2, 0.0])
    answers, _ = ask([usage(1)], OPENAI, work)
    assert answers[0].began - answers[1].began >= 0.15


@pytest.mark.parametrize(
    ("events", "status", "said"),
    [
        ([usage(1)], 200, "an answer has 1 of 3 tokens"),
        ([usage(1), {"error": {"message": "no room"}}], 200, "broke off: .*no room"),
        ([{"error": "queue is full"}], 429, "answered 429: .*queue is full"),
    ],
)
def test_what_is_no_answer_is_told(events, status, said):
    with pytest.raises(PeerFailed, match=said):
        ask(events, OPENAI, Work("x", [[5]], [3], [0.0]), status=status)


def test_a_server_that_is_not_there_is_told():
    with pytest.raises(PeerFailed, match="W9: Connect"):
        asyncio.run(asked(1, OPENAI, Work("W9", [[5]], [3], [0.0])))


def test_a_model_in_another_type_has_the_same_weights(tmp_path):
    lots = np.random.default_rng(1)
    weights = {name: lots.normal(size=(8, 64)).astype(np.float32) for name in ("a", "b")}
    source = gguf.GGUFWriter(tmp_path / "source.gguf", "llama")
    source.add_block_count(1)
    source.add_token_list(["x", "y"])
    source.add_tensor("norm", np.ones(64, np.float32))
    eight_bits = gguf.GGMLQuantizationType.Q8_0
    for name, values in weights.items():
        source.add_tensor(name, gguf.quants.quantize(values, eight_bits), raw_dtype=eight_bits)
    source.write_header_to_file()
    source.write_kv_data_to_file()
    source.write_tensors_to_file()
    source.close()
    for type_, tolerance in ((gguf.GGMLQuantizationType.BF16, 0.05), (eight_bits, 0.03)):
        path = tmp_path / f"{type_.name}.gguf"
        write_as(type_, tmp_path / "source.gguf", path)
        made = gguf.GGUFReader(path)
        assert made.fields["llama.block_count"].contents() == 1
        assert made.fields["tokenizer.ggml.tokens"].contents() == ["x", "y"]
        found = {tensor.name: tensor for tensor in made.tensors}
        assert found["norm"].tensor_type is gguf.GGMLQuantizationType.F32
        for name, values in weights.items():
            assert found[name].tensor_type is type_
            read = gguf.quants.dequantize(found[name].data, type_)
            assert np.abs(read - values).max() < tolerance
