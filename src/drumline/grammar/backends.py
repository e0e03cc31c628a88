"""The libraries that compile grammars, by name."""

from typing import Protocol

from drumline.contract.grammar import Grammar
from drumline.core.config import GrammarBackend
from drumline.core.errors import ConfigError, InvariantError
from drumline.grammar.prepare import Prepared
from drumline.grammar.vocabulary import Vocabulary


class Backend(Protocol):
    """A library that compiles grammars. Thread: any."""

    def compile(self, prepared: Prepared) -> Grammar:
        """Return the compiled grammar. Raises RefusedGrammarError for one that never compiles."""


def open_backend(name: GrammarBackend, vocabulary: Vocabulary) -> Backend:
    """Return the library `name`, loaded now, which may take seconds.

    Raises ConfigError when it is not installed.
    """
    try:
        return _opened(name, vocabulary)
    except ImportError as error:
        raise ConfigError(
            "--grammar-backend",
            f"{name} cannot be loaded ({error}); run: pip install --no-deps {name}",
        ) from None


def _opened(name: GrammarBackend, vocabulary: Vocabulary) -> Backend:
    # Loaded here and not above: xgrammar brings torch and transformers along, and most
    # engines never see a grammar.
    match name:
        case GrammarBackend.XGRAMMAR:
            from drumline.grammar.xgrammar_backend import XgrammarBackend  # noqa: PLC0415

            return XgrammarBackend(vocabulary)
        case GrammarBackend.LLGUIDANCE:
            from drumline.grammar.llguidance_backend import LlguidanceBackend  # noqa: PLC0415

            return LlguidanceBackend(vocabulary)
        case GrammarBackend.NONE:
            raise InvariantError("no grammar backend was chosen, and one is asked for")
