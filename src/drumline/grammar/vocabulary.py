"""The model's vocabulary as a grammar sees it: the bytes that each id stands for.

Ids that mark structure stand for nothing here, so that no grammar can ever allow
them, whatever text their names spell.
"""

from typing import Any

from msgspec import Struct

from drumline.core.errors import ConfigError
from drumline.core.gguf_file import read_gguf
from drumline.core.model_files import ModelFiles, ModelFormat, read_json
from drumline.core.pieces import Alphabet, piece_bytes

_GGUF_TEXT = frozenset({1, 4, 6})
"""A GGUF file's kinds of tokens that are text: normal, user-defined, byte."""


class Vocabulary(Struct, frozen=True):
    """What ids stand for: nothing for those that are no text."""

    pieces: tuple[bytes, ...]
    """One for each id of the model's logits."""
    stop_ids: tuple[int, ...]
    """Ids at which the model ends its turn."""

    @property
    def size(self) -> int:
        return len(self.pieces)

    @property
    def mask_words(self) -> int:
        """The int32 words of a mask over all ids."""
        return (self.size + 31) // 32


def read_vocabulary(files: ModelFiles, size: int, stop_ids: tuple[int, ...]) -> Vocabulary:
    """Return the vocabulary of a model whose logits have `size` entries.

    Raises ConfigError naming the file that does not say it.
    """
    if files.format is ModelFormat.GGUF:
        texts, alphabet = _gguf_texts(files)
    else:
        texts, alphabet = _directory_texts(files)
    pieces = [b""] * size
    for id_, text in texts.items():
        if 0 <= id_ < size:
            pieces[id_] = piece_bytes(text, alphabet)
    for id_ in stop_ids:
        if 0 <= id_ < size:
            pieces[id_] = b""
    return Vocabulary(tuple(pieces), stop_ids)


def _gguf_texts(files: ModelFiles) -> tuple[dict[int, str], Alphabet]:
    file = read_gguf(files.path)
    tokens: Any = file.require("tokenizer.ggml.tokens")
    kinds: Any = file.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    texts = {
        id_: token
        for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in _GGUF_TEXT
    }
    marked = file.metadata.get("tokenizer.ggml.model") == "llama"
    return texts, Alphabet.SPACE_MARKS if marked else Alphabet.BYTE_LEVEL


def _directory_texts(files: ModelFiles) -> tuple[dict[int, str], Alphabet]:
    path = files.path / "tokenizer.json"
    data = read_json(path)
    vocabulary: Any = data.get("model", {}).get("vocab")
    if isinstance(vocabulary, dict):
        texts = {id_: text for text, id_ in vocabulary.items()}
    elif isinstance(vocabulary, list):
        texts = {id_: entry[0] for id_, entry in enumerate(vocabulary)}
    else:
        raise ConfigError(str(path), "has no model.vocab, which grammars need")
    for token in data.get("added_tokens", ()):
        if token.get("special"):
            texts.pop(token["id"], None)
        else:
            texts[token["id"]] = token["content"]
    byte_level = '"ByteLevel"' in str(data.get("decoder")).replace("'", '"')
    return texts, Alphabet.BYTE_LEVEL if byte_level else Alphabet.SPACE_MARKS
