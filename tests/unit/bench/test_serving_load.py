"""The load for a running server: what is drawn, what is heard of streams, what figures are made."""

import asyncio
import json

import msgspec
import pytest

from drumline.bench.client import Target, connected, target_of
from drumline.bench.figures import Answer, percentile, summary, table
from drumline.bench.load import body_of, drawn
from drumline.bench.serving import measured
from drumline.core.config.bench import Endpoint, LoadConfig, TargetConfig
from drumline.core.errors import ConfigError, PeerError

LOAD = LoadConfig(num_prompts=5, random_input_len=6, random_output_len=3)


def piece(text):
    return {"choices": [{"text": text}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": 3}}
SAID = [piece("a"), piece(""), piece("b"), USAGE]


class Speaker:
    """A server that answers each post with what `answer` makes of its number, byte for byte."""

    def __init__(self, answer, after_s=0.0):
        self.answer, self.after_s = answer, after_s
        self.heard = []
        self.busy = self.busiest = 0

    async def __call__(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        self.heard.append((head, await reader.readexactly(length)))
        number = len(self.heard) - 1
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        try:
            await asyncio.sleep(self.after_s)
            writer.write(self.answer(number))
        finally:
            self.busy -= 1
            writer.close()


def chunked(events, size=None, status=200):
    """Return a reply of events whose chunks are of one size, whatever they cut."""
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\r\n\r\n" for event in events)
    body += b"data: [DONE]\n\n"
    size = size or len(body)
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    return (
        f"HTTP/1.1 {status} Said\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        + b"".join(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in chunks)
        + b"0\r\n\r\n"
    )


def beside(speaker, use):
    """Run `use`, given a port, beside a server."""

    async def run():
        async with await asyncio.start_server(speaker, "127.0.0.1", 0) as server:
            return await use(server.sockets[0].getsockname()[1])

    return asyncio.run(run())


def heard_of(reply):
    events = []

    async def use(port):
        async with connected(Target("127.0.0.1", port)) as connection:
            await connection.post("/x", b"{}", lambda data: events.append(json.loads(data)))

    beside(Speaker(lambda _: reply), use)
    return events


@pytest.mark.parametrize("size", [1, 7, None])
def test_events_are_heard_whole_wherever_chunks_are_cut(size):
    assert heard_of(chunked(SAID, size)) == SAID


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (chunked([{"error": "queue is full"}], status=429), "answered 429: .*queue is full"),
        (chunked(SAID)[:-40], "broke off"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no HTTP was answered"),
        (b"", "broke off"),
    ],
)
def test_what_is_no_stream_is_told(reply, said):
    with pytest.raises(PeerError, match=said):
        heard_of(reply)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:9000", Target("127.0.0.1", 9000)),
        ("http://[::1]:9000/v1/", Target("::1", 9000)),
        ("https://a.example/llm/v1", Target("a.example", 443, True, "/llm")),
    ],
)
def test_a_url_may_end_as_openai_clients_write_it(url, target):
    assert target_of(url) == target


@pytest.mark.parametrize("url", ["a.example:9000", "ftp://a.example", "http://a:x", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="--base-url: "):
        target_of(url)


def test_a_seed_gives_the_same_requests_again_at_any_rate():
    slow, quick = (
        drawn(msgspec.structs.replace(LOAD, request_rate=rate), Endpoint.COMPLETIONS)
        for rate in (2.0, 4.0)
    )
    assert [each.prompt for each in slow] == [each.prompt for each in quick]
    assert [each.due_s for each in slow] == [2 * each.due_s for each in quick]
    others = drawn(msgspec.structs.replace(LOAD, seed=1), Endpoint.COMPLETIONS)
    assert [each.prompt for each in others] != [each.prompt for each in slow]


def test_without_a_rate_all_are_due_at_once():
    assert {each.due_s for each in drawn(LOAD, Endpoint.COMPLETIONS)} == {0.0}


def test_a_rate_is_kept_on_average():
    load = msgspec.structs.replace(LOAD, num_prompts=2000, request_rate=50.0)
    due = [each.due_s for each in drawn(load, Endpoint.COMPLETIONS)]
    assert due == sorted(due)
    assert due[-1] == pytest.approx(40, rel=0.1)


def test_lengths_differ_by_the_ratio_at_most():
    load = msgspec.structs.replace(
        LOAD, num_prompts=300, random_input_len=100, random_range_ratio=0.5
    )
    lengths = {len(each.prompt) for each in drawn(load, Endpoint.COMPLETIONS)}
    assert min(lengths) in range(50, 60)
    assert max(lengths) in range(140, 151)


def test_ids_stay_below_the_vocabulary():
    load = msgspec.structs.replace(LOAD, random_input_len=500, vocab_size=20)
    ids = {id_ for each in drawn(load, Endpoint.COMPLETIONS) for id_ in each.prompt}
    assert ids == set(range(10, 20))


def test_a_chat_is_asked_in_words():
    (asked, *_) = drawn(LOAD, Endpoint.CHAT)
    body = body_of(asked, "m", ignore_eos=False)
    (message,) = body["messages"]
    assert len(message["content"].split()) == LOAD.random_input_len
    assert body["max_tokens"] == LOAD.random_output_len
    assert "ignore_eos" not in body
    assert "prompt" not in body


def ask(speaker, load=LOAD, **target):
    async def use(port):
        config = TargetConfig(base_url=f"http://127.0.0.1:{port}", **{"model": "m"} | target)
        return await measured(config, load)

    return beside(speaker, use)


def test_a_request_goes_ahead_and_does_not_count():
    speaker = Speaker(lambda _: chunked(SAID))
    results = ask(speaker, api_key="k")
    assert len(speaker.heard) == 6
    assert [(a.input_tokens, a.output_tokens, len(a.stamps_s)) for a in results.answers] == (
        [(6, 3, 2)] * 5
    )
    assert all(b"Authorization: Bearer k\r\n" in head for head, _ in speaker.heard)
    assert len({body for _, body in speaker.heard}) == 6


def test_the_model_is_the_first_that_the_server_lists():
    listed = b'{"data": [{"id": "tiny"}, {"id": "b"}]}'
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(listed), listed)
    speaker = Speaker(lambda number: chunked(SAID) if number else reply)
    assert ask(speaker, model=None).model == "tiny"
    assert json.loads(speaker.heard[-1][1])["model"] == "tiny"


def test_pieces_are_counted_where_no_usage_is_told():
    results = ask(Speaker(lambda _: chunked([piece("a"), piece("b")])))
    assert results.answers[0].output_tokens == 2
    assert results.answers[0].input_tokens == LOAD.random_input_len


def test_no_more_are_under_way_than_may_be():
    speaker = Speaker(lambda _: chunked(SAID), after_s=0.01)
    ask(speaker, msgspec.structs.replace(LOAD, max_concurrency=2))
    assert speaker.busiest == 2


def test_failures_are_kept_apart_with_their_reasons():
    replies = [
        chunked(SAID),
        chunked([{"error": "full"}], status=429),
        chunked([piece("a"), {"error": {"message": "no room"}}]),
        chunked([piece("")]),
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ndata: x\n\n",
        chunked(SAID),
    ]
    results = ask(Speaker(lambda number: replies[number]))
    assert len(results.answers) == 1
    told = "\n".join(sorted(results.failures))
    for reason in ("answered 429", "no room", "an answer has no text", "cannot be read"):
        assert reason in told


def test_a_server_that_does_not_answer_in_time_is_told():
    with pytest.raises(PeerError, match="no answer in time"):
        ask(Speaker(lambda _: b"", after_s=5), request_timeout=0.05)


def test_a_server_that_is_not_there_is_told():
    with pytest.raises(PeerError, match=r"http://127\.0\.0\.1:1: "):
        asyncio.run(measured(TargetConfig(base_url="http://127.0.0.1:1"), LOAD))


def test_figures_are_those_of_the_answers():
    answers = [Answer(10.0, [10.5, 11.0, 12.0], 100, 5), Answer(11.0, [11.1], 50, 1)]
    figures = summary(answers)
    assert figures["duration"] == 2.0
    assert figures["total_token_throughput"] == 78.0
    assert figures["concurrency"] == 1.05
    assert figures["median_ttft_ms"] == 300.0
    assert figures["mean_tpot_ms"] == 375.0
    assert figures["mean_itl_ms"] == 750.0
    assert figures["p99_e2el_ms"] == 1981.0
    assert table(figures).splitlines()[-1].split() == [
        *("E2EL", "1050.00", "1050.00", "1810.00", "1981.00")
    ]


def test_answers_of_one_token_have_no_time_between_tokens():
    assert "mean_itl_ms" not in summary([Answer(0.0, [1.0], 1, 1)])


def test_percentiles_lie_between_values():
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0], 0.99) == 1.0
