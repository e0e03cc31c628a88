"""What evaluations ask: prompts repeated with the log probabilities of their tokens.

`lm-eval` itself brings data sets and more along, so it is no part of the environment: the test
that runs it is skipped unless `DRUMLINE_LM_EVAL` names a Python that has it.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 "lm-eval[api]" transformers
    DRUMLINE_LM_EVAL=VENV/bin/python pytest tests/e2e/test_evaluations.py
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.e2e.conftest import MODEL

from drumline.core.model_files import find_model
from drumline.frontend.text.load import load_tokenizer

TASK = Path(__file__).parent / "lm_eval"
PYTHON = os.environ.get("DRUMLINE_LM_EVAL")
RUN_S = 300


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(find_model(None))


def asked(http, prompts, **more):
    """Ask as lm-eval's local-completions does; return the choices in order."""
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    reply = http.post("/v1/completions", json=body | {"seed": 1234, "echo": True} | more)
    assert reply.status_code == 200, reply.text
    return sorted(reply.json()["choices"], key=lambda choice: choice["index"])


def likelihood(choice, context_tokens):
    """Return the log probability of what follows the context, and whether each token is likeliest.

    The last column is that of the token that was generated, and no part of it.
    """
    columns = choice["logprobs"]
    own = columns["token_logprobs"][context_tokens:-1]
    top = columns["top_logprobs"][context_tokens:-1]
    return sum(own), all(value == max(best.values()) for value, best in zip(own, top, strict=True))


def test_prompts_are_repeated_in_columns_that_line_up(http, tokenizer):
    texts = ["The capital of France is Paris", "Drums 🥁 and naïve words", "one"]
    prompts = [tokenizer.encode(text, add_special=False) for text in texts]
    for choice, ids, text in zip(asked(http, prompts), prompts, texts, strict=True):
        columns = choice["logprobs"]
        assert {len(column) for column in columns.values()} == {len(ids) + 1}
        assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
        assert all(value <= 0 for value in columns["token_logprobs"][1:])
        assert columns["tokens"][: len(ids)] == [
            tokenizer.piece(id_).decode(errors="replace") for id_ in ids
        ]
        assert choice["text"].startswith(text)
        for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
            if text.isascii():
                assert choice["text"][offset : offset + len(token)] == token


def test_what_is_generated_greedily_is_the_likeliest_and_anything_else_is_not(http, tokenizer):
    context = tokenizer.encode("The capital of France is", add_special=False)
    body = {"prompt": context, "temperature": 0, "max_tokens": 6, "logprobs": 1}
    made = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()["choices"][0]
    right = context + made["token_ids"]
    wrong = [*right[:-2], (right[-2] + 1) % 40_000, right[-1]]
    first, second = asked(http, [right, wrong])
    total, greedy = likelihood(first, len(context))
    assert greedy
    assert total == pytest.approx(sum(made["logprobs"]["token_logprobs"]), abs=1e-3)
    worse, greedy = likelihood(second, len(context))
    assert not greedy
    assert worse < total


def test_answers_of_the_task_are_ranked_by_their_likelihood(http, tokenizer):
    rows = [json.loads(line) for line in (TASK / "capitals.jsonl").read_text().splitlines()]
    contexts = [tokenizer.encode(row["question"], add_special=False) for row in rows]
    prompts = [
        context + tokenizer.encode(choice, add_special=False)
        for row, context in zip(rows, contexts, strict=True)
        for choice in row["choices"]
    ]
    told = iter(asked(http, prompts))
    right = 0
    for row, context in zip(rows, contexts, strict=True):
        sums = [likelihood(next(told), len(context))[0] for _ in row["choices"]]
        right += sums.index(max(sums)) == row["answer"]
    assert right >= len(rows) - 1


@pytest.mark.skipif(PYTHON is None, reason="DRUMLINE_LM_EVAL names no Python that has lm-eval")
def test_lm_eval_runs_a_task_of_ours(server, tokenizer, tmp_path):
    files = tmp_path / "tokenizer"
    files.mkdir()
    tokenizer.write(files)
    for each in TASK.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    arguments = {
        "model": MODEL,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(files),
        "num_concurrent": "2",
    }
    run = subprocess.run(
        [
            PYTHON, "-m", "lm_eval", "--model", "local-completions",
            "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
            "--tasks", "drumline_capitals", "--include_path", str(tmp_path),
            "--output_path", str(tmp_path / "out"), "--batch_size", "4",
        ],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    (file,) = (tmp_path / "out").rglob("results*.json")
    told = json.loads(file.read_text())["results"]["drumline_capitals"]
    assert told["acc,none"] >= 7 / 8
