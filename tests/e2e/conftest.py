"""One server of the embedded model for all tests of a module that only ask it things, and a
model that is small enough to be started again and again."""

import signal
from collections.abc import Iterator

import httpx
import openai
import pytest
import torch
import transformers
from tests.e2e.processes import Server
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Let programs of these tests hear Ctrl-C, though a shell's background jobs ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--max-total-tokens", "8192")
    try:
        yield server.wait_ready()
        server.signal()
        assert server.wait() == 0, server.said
    finally:
        server.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return the directory of a small Llama of random weights; three heads share a KV head."""
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=144,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    made = transformers.AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.2 * noise)
    directory = tmp_path_factory.mktemp("model")
    made.save_pretrained(directory)
    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(512)}, "w0"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
