import numpy as np
import pytest

from drumline.core.config import GrammarBackend
from drumline.core.model_files import find_model
from drumline.frontend.text.load import load_tokenizer
from drumline.grammar.backends import open_backend
from drumline.grammar.vocabulary import read_vocabulary

EOS = 2


class Library:
    """A backend on the embedded model's vocabulary, and text driven through its matchers."""

    def __init__(self, name, vocabulary, tokenizer):
        self.name = name
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer
        self.backend = open_backend(GrammarBackend(name), vocabulary)

    def accepts(self, grammar, text, *, masked=True):
        """Whether the text's tokens, then a stop id, are all taken, as their masks say.

        llguidance masks one way of spelling what is certain, and takes any.
        """
        matcher = grammar.matcher()
        mask = np.zeros((1, self.vocabulary.mask_words), np.int32)
        for token in [*self.tokenizer.encode(text, add_special=False), EOS]:
            if masked:
                matcher.fill(mask, 0)
            allowed = bool(mask[0, token // 32] >> (token % 32) & 1)
            taken = matcher.accept(token)
            if masked:
                assert taken or not allowed
                assert allowed or not taken or self.name == "llguidance"
            if not taken:
                return False
        assert matcher.terminated
        return True


@pytest.fixture(scope="session")
def files():
    return find_model(None)


@pytest.fixture(scope="session")
def tokenizer(files):
    return load_tokenizer(files)


@pytest.fixture(scope="session")
def vocabulary(files, tokenizer):
    return read_vocabulary(files, tokenizer.vocab_size, (EOS,))


@pytest.fixture(scope="session", params=["xgrammar", "llguidance"])
def library(request, vocabulary, tokenizer):
    return Library(request.param, vocabulary, tokenizer)
