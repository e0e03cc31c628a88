"""Every example of the README and of other pages is run as it stands, but for the port."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.e2e.processes import REPOSITORY, Server, environment, gone_within

README = (REPOSITORY / "README.md").read_text()
EXAMPLE = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXAMPLES = EXAMPLE.findall(README)
OF_PAGES = [
    example
    for page in sorted((REPOSITORY / "docs").rglob("*.md"))
    for example in EXAMPLE.findall(page.read_text())
]


def test_the_readme_has_an_example_of_each_way_to_ask():
    together = "".join(code for _, code in EXAMPLES)
    for way in ("curl", "from openai", "from drumline import LLM", "drumline generate"):
        assert way in together


@pytest.mark.parametrize(("language", "code"), [*EXAMPLES, *OF_PAGES])
def test_an_example_answers(language: str, code: str, server: Server):
    code = code.replace("http://127.0.0.1:8000", server.url)
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euc", code]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment() | {"PATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10
    assert "error" not in done.stdout


SERVERS = re.findall(
    r"^    drumline serve (--[a-z]+-parallel-size .*?)(?: +#.*)?$", README, re.MULTILINE
)
TITLES = {
    "--tensor-parallel-size 2": ["drumline::rank0_tp0", "drumline::rank1_tp1"],
    "--data-parallel-size 2": ["drumline::rank0_dp0", "drumline::rank1_dp1"],
    "--pipeline-parallel-size 2": ["drumline::rank0_pp0", "drumline::rank1_pp1"],
}


def test_the_readme_starts_each_kind_of_several_processes():
    assert sorted(SERVERS) == sorted(TITLES)


@pytest.mark.parametrize("flags", SERVERS)
def test_a_server_of_two_processes_from_the_readme_answers_and_ends_as_it_says(flags: str):
    server = Server("--max-total-tokens", "4096", *shlex.split(flags))
    try:
        server.wait_ready()
        ranks = server.ranks()
        assert sorted(rank.cmdline()[0] for rank in ranks) == TITLES[flags]
        body = {"prompt": "One two three", "max_tokens": 4, "temperature": 0}
        texts = set()
        for rank in (0, 1):
            reply = httpx.post(
                f"{server.url}/v1/completions", json=body | {"data_parallel_rank": rank}, timeout=60
            )
            assert reply.json()["usage"]["completion_tokens"] == 4
            texts.add(reply.json()["choices"][0]["text"])
        assert len(texts) == 1, "whichever process answers"
        if "data" not in flags:
            second = next(rank for rank in ranks if "rank1" in rank.cmdline()[0])
            os.kill(second.pid, signal.SIGKILL)
            assert server.wait(20) == 1
            assert server.lines[-1].startswith("drumline: rank 1 was killed by SIGKILL")
        else:
            beyond = body | {"data_parallel_rank": 2}
            reply = httpx.post(f"{server.url}/v1/completions", json=beyond, timeout=60)
            assert reply.status_code == 400
            assert "data_parallel_rank" in reply.json()["error"]["message"]
            server.signal()
            assert server.wait() == 0, server.said
        assert gone_within(ranks, 2)
    finally:
        server.close()
