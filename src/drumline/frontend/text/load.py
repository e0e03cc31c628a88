"""The tokenizer of a model that was found."""

from drumline.core.gguf_file import read_gguf
from drumline.core.model_files import ModelFiles, ModelFormat
from drumline.frontend.text.directory_tokenizer import directory_tokenizer
from drumline.frontend.text.gguf_tokenizer import gguf_tokenizer
from drumline.frontend.text.tokenizer import Tokenizer


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Return the tokenizer of `files`. Raises ConfigError naming what is wrong with it."""
    if files.format is ModelFormat.GGUF:
        return gguf_tokenizer(read_gguf(files.path))
    return directory_tokenizer(files.path)
