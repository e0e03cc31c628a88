"""What tests of the TokenSpeed gateway share: when to skip, where it runs, what it reads."""

import importlib.util
import socket

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

needs_smg = pytest.mark.skipif(
    importlib.util.find_spec("smg") is None, reason="tokenspeed-smg is not installed"
)

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def byte_tokenizer(words=0):
    """Return a tokenizer with one token a byte, an end, and `words` further words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, "<|end|>", *(f"Ġw{n}" for n in range(words))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    pipeline = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens(["<|end|>"])
    return pipeline
