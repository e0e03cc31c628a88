"""`LLM` and `AsyncLLM` in a program of their own, `generate` and `chat` on the command line."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from tests.e2e.processes import START_S, environment, gone_within, run

from drumline import LLM, AsyncLLM, SamplingParams
from drumline.core.errors import ConfigError, PeerError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_total_tokens=4096) as llm:
        yield llm


def test_outputs_have_the_shape_that_vllms_users_know(llm):
    outputs = llm.generate([PROMPT, "One, two,"], GREEDY)
    assert [output.prompt for output in outputs] == [PROMPT, "One, two,"]
    first = outputs[0]
    assert first.finished
    assert first.outputs[0].text.startswith(" Paris")
    assert len(first.outputs[0].token_ids) == 8
    assert first.outputs[0].finish_reason == "length"
    assert len(first.prompt_token_ids) > 3


def test_a_prompt_may_be_token_ids_and_parameters_may_differ(llm):
    ids = llm.generate(PROMPT, GREEDY)[0].prompt_token_ids
    short, long = llm.generate(
        [ids, ids], [GREEDY, SamplingParams(temperature=0, max_tokens=12, n=2)]
    )
    assert len(short.outputs[0].token_ids) == 8
    assert [answer.index for answer in long.outputs] == [0, 1]
    assert long.outputs[0].token_ids[:8] == short.outputs[0].token_ids
    assert short.prompt is None


def test_log_probabilities_have_the_shape_that_vllms_users_know(llm):
    ways = SamplingParams(temperature=0, max_tokens=6, n=2, logprobs=2, prompt_logprobs=4)
    for _ in range(2):  # the second time, the prompt is cached
        (output,) = llm.generate(PROMPT, ways)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for token, told in zip(
            output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
        ):
            assert token in told
            assert 4 <= len(told) <= 5
            assert sorted(one.rank for one in told.values() if one.rank) == [1, 2, 3, 4]
        for answer in output.outputs:
            chosen = [told[t] for t, told in zip(answer.token_ids, answer.logprobs, strict=True)]
            assert [one.rank for one in chosen] == [1] * 6
            assert answer.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen))
            assert all(len(told) == 2 for told in answer.logprobs)
            assert chosen[0].decoded_token == " Paris"
    (plain,) = llm.generate(PROMPT, GREEDY)
    assert plain.prompt_logprobs is plain.outputs[0].logprobs is None
    with pytest.raises(RequestError, match="prompt_logprobs is 21"):
        llm.generate(PROMPT, SamplingParams(prompt_logprobs=21))


def test_a_conversation_is_answered_and_streamed_alike(llm):
    messages = [{"role": "user", "content": "Say one word."}]
    whole = llm.chat(messages, GREEDY)[0].outputs[0]
    parts = list(llm.stream_chat(messages, GREEDY))
    assert parts[-1].outputs[0] == whole
    assert len(parts) > 2
    assert len(parts[0].outputs[0].token_ids) < 8, "outputs given earlier do not grow"


def test_a_stop_string_is_named(llm):
    text = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    stop = text[4:8]
    answer = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, stop=stop))[0]
    assert answer.outputs[0].text == text[:4]
    assert answer.outputs[0].stop_reason == stop


@pytest.mark.parametrize(
    ("prompt", "params", "told"),
    [
        (PROMPT, SamplingParams(temperature=9), "temperature"),
        (PROMPT, SamplingParams(n=0), "n"),
        ([10**7], GREEDY, "10000000"),
        ([100] * 5000, GREEDY, "5000"),
        ([[]], GREEDY, "without tokens"),
        ([[1.5]], GREEDY, "list of token ids"),
        ("\ud800", GREEDY, "surrogate"),
        (PROMPT, SamplingParams(temperature="hot"), "temperature"),
        (PROMPT, SamplingParams(min_tokens=9, max_tokens=8), "min_tokens is 9"),
    ],
)
def test_a_wrong_request_is_refused_and_the_next_one_served(llm, prompt, params, told):
    with pytest.raises(RequestError, match=told):
        llm.generate(prompt, params)
    assert llm.generate(PROMPT, GREEDY)[0].finished


def test_leaving_a_stream_early_aborts_it(llm):
    stream = llm.stream_generate(PROMPT, SamplingParams(temperature=0, max_tokens=2000))
    next(stream)
    stream.close()
    assert llm.generate(PROMPT, GREEDY)[0].finished


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="max_model_lne: no such option; did you mean max_model"):
        LLM(max_model_lne=5)


def test_a_model_that_is_not_there_is_refused_at_once():
    with pytest.raises(ConfigError, match="/nowhere"):
        LLM("/nowhere")


def test_an_async_engine_streams_several_at_once_and_closes():
    async def answer(llm: AsyncLLM, prompt: str):
        async for output in llm.generate(prompt, GREEDY):
            last = output
        return last

    async def program():
        async with AsyncLLM(max_total_tokens=4096) as llm:
            outputs = await asyncio.gather(answer(llm, PROMPT), answer(llm, "Two and two is"))
            assert outputs[0].outputs[0].text.startswith(" Paris")
            assert all(output.finished for output in outputs)
        with pytest.raises(PeerError, match="not running"):
            await answer(llm, PROMPT)

    asyncio.run(program())


def test_a_program_that_just_ends_leaves_no_rank_behind():
    code = (
        "from drumline import LLM\n"
        "llm = LLM(max_total_tokens=1024)\n"
        "import psutil; print(psutil.Process().children()[0].pid, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    assert done.stderr == ""
    assert not psutil.pid_exists(int(done.stdout))


def test_generate_prints_plain_text_into_a_pipe():
    done = run("generate", PROMPT, "--raw", "--temperature", "0", "--max-tokens", "5")
    assert done.status == 0, done
    assert done.out.startswith(" Paris")
    assert done.out.endswith("\n")
    assert done.err == ""


def test_generate_reads_standard_input_and_prints_json():
    done = run("generate", "-", "--json", "--max-tokens", "2", stdin="Say hi.\n")
    assert done.status == 0, done
    answer = json.loads(done.out)
    assert "Say hi." in answer["prompt"]
    assert len(answer["outputs"][0]["token_ids"]) == 2


def test_a_seed_on_the_command_line_repeats_an_answer():
    drawn = [
        run("generate", "Tell a story.", "--seed", "3", "--max-tokens", "12").out for _ in "ab"
    ]
    assert drawn[0] == drawn[1] != ""


def test_generate_refuses_what_is_wrong_in_one_line():
    for arguments, told in (
        ([], "PROMPT: there is none"),
        (["hi", "--model", "/nowhere"], "/nowhere"),
        (["hi", "--temperature", "3"], "--temperature: '3' will not do"),
    ):
        done = run("generate", *arguments)
        assert done.status == 2, done
        assert told in done.err
        assert done.err.count("\n") == 1, done


def test_chat_streams_remembers_resets_and_leaves():
    lines = "My name is Ada.\n\n/reset\n/help\nHi.\n/exit\nnever read\n"
    done = run("chat", "--max-tokens", "4", "--temperature", "0", stdin=lines)
    assert done.status == 0, done
    assert "SmolLM2-135M-Instruct (embedded)" in done.out
    assert "forgotten." in done.out
    assert done.out.count("> ") == 6


def test_ctrl_c_stops_an_answer_and_not_the_chat():
    leader, follower = pty.openpty()
    chat = subprocess.Popen(
        [sys.executable, "-m", "drumline", "chat", "--temperature", "0"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment(),
        start_new_session=True,
    )
    os.close(follower)
    said = ""

    def until(pattern: str) -> None:
        nonlocal said
        deadline = time.perf_counter() + START_S
        while not re.search(pattern, said, re.DOTALL):
            readable, _, _ = select.select([leader], [], [], deadline - time.perf_counter())
            assert readable, said
            try:
                said += os.read(leader, 4096).decode(errors="replace")
            except OSError:  # nobody is at the other end any more
                raise AssertionError(f"the chat ended: {said}") from None

    try:
        until("Ctrl-C stops an answer.*> ")
        os.write(leader, b"Tell me a very long story.\n")
        until("story.\r\n.{20}")
        chat.send_signal(signal.SIGINT)
        until(" …\r\n.*> $")
        ranks = psutil.Process(chat.pid).children()
        os.write(leader, b"/exit\n")
        assert chat.wait(20) == 0
        assert gone_within(ranks, 2)
    finally:
        chat.kill()
        chat.wait()
        os.close(leader)
