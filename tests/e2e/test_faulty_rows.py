"""What one row meets ends that row alone, by a running server: logits that are no numbers, a
processor of an installed package that fails, a grammar that the vocabulary cannot spell."""

import os
import shutil
import textwrap
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
import transformers
from tests.e2e.processes import Server

POISON = 7
COUNTER = "tokenspeed:num_nan_aborted_requests_total"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PACKAGE = {
    "favour/__init__.py": """
        class Favour:
            def __init__(self, vocab):
                self.vocab = vocab

            def process(self, logits, rows):
                for row, asked in zip(logits, rows, strict=True):
                    wanted = asked.params["token"] + len(asked.answer)
                    if wanted >= self.vocab:
                        raise ValueError("no such token")
                    row[wanted] = 1e9
    """,
    "favour-1.0.dist-info/METADATA": """
        Metadata-Version: 2.1
        Name: favour
        Version: 1.0
    """,
    "favour-1.0.dist-info/entry_points.txt": """
        [drumline.logits_processors]
        favour = favour:Favour
    """,
}


@pytest.fixture(scope="module")
def poisoned(tiny_model, tmp_path_factory):
    """A model in which one token's embedding is no number, and which reads it from no logit."""
    directory = tmp_path_factory.mktemp("poisoned")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.tie_word_embeddings = False
    embedding = model.get_input_embeddings().weight
    model.lm_head.weight = torch.nn.Parameter(embedding.detach().clone())
    with torch.no_grad():
        embedding[POISON] = torch.nan
    model.save_pretrained(directory)
    shutil.copy(tiny_model / "tokenizer.json", directory)
    return directory


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A directory as an installer leaves it, with a package that registers a processor."""
    directory = tmp_path_factory.mktemp("site-packages")
    for name, text in PACKAGE.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return directory


@pytest.fixture(scope="module")
def http(poisoned, installed):
    with pytest.MonkeyPatch.context() as patch:
        before = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", f"{installed}{os.pathsep}{before}")
        server = Server(
            "--model", str(poisoned), "--max-total-tokens", "4096", "--dtype", "float32",
            "--logits-processors", "favour",
        )  # fmt: skip
    try:
        url = server.wait_ready().url
        with httpx.Client(base_url=url, timeout=120) as client:
            yield client
        server.signal()
        assert server.wait() == 0, server.said
    finally:
        server.close()


def ask(http, prompt=PROMPT, **options):
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | options
    return http.post("/v1/completions", json=body)


def text(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def error(response):
    return response.status_code, response.json()["error"]["message"]


def test_a_row_without_numbers_ends_with_its_code_and_others_go_on(http):
    alone = text(ask(http))

    def counted():
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(COUNTER))

    before = counted()
    with ThreadPoolExecutor(8) as pool:
        well = [pool.submit(ask, http, max_tokens=40) for _ in range(4)]
        ill = [pool.submit(ask, http, [n, POISON, *PROMPT]) for n in range(3)]
        native = pool.submit(
            http.post, "/generate", json={"input_ids": [POISON, 1], "sampling_params": {}}
        )
    for asked in well:
        assert text(asked.result()).startswith(alone)
    for asked in ill:
        assert error(asked.result()) == (500, "the model's output was not finite (NaN or infinity)")
    assert native.result().status_code == 500
    assert counted() == before + 4
    assert text(ask(http)) == alone


def test_a_processor_of_an_installed_package_serves_who_names_it(http):
    plain = text(ask(http))
    assert text(ask(http, logits_processors={"favour": {"token": 20}})) == "".join(
        f"w{n}" for n in range(20, 28)
    )
    assert text(ask(http)) == plain
    status, why = error(ask(http, logits_processors={"favour": {"token": 510}}))
    assert (status, "a logits processor failed" in why) == (500, True)
    status, why = error(ask(http, logits_processors=["other"]))
    assert (status, "'other' is not loaded here; favour is" in why) == (400, True)


def test_what_the_vocabulary_cannot_spell_is_the_clients_fault(http):
    for held, why in (
        ({"guided_choice": ["w1", "blue"]}, "the choice 'blue'"),
        ({"response_format": {"type": "json_object"}}, "cannot spell '{', with which it begins"),
        ({"guided_regex": "w1w3x"}, "cannot spell 'x' behind 'w1w3'"),
    ):
        status, said = error(ask(http, **held))
        assert status == 400
        assert why in said
    # Where one way leads to an end, another one may still lead nowhere.
    held = {"guided_regex": "w1x|w3", "logits_processors": {"favour": {"token": 1}}}
    status, said = error(ask(http, **held))
    assert (status, "vocabulary cannot spell" in said) == (400, True)
    held["logits_processors"]["favour"]["token"] = 3
    assert text(ask(http, **held)) == "w3w2"  # the second ends the turn, and has a text here
