"""A model's tokenizer: text to ids, and the bytes each id stands for.

It wraps a `tokenizers` pipeline that `gguf_tokenizer` or `directory_tokenizer`
built. It does not know where the pipeline came from, and loads no torch.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import tokenizers
from msgspec import Struct

from drumline.core.pieces import Alphabet, byte_piece, piece_bytes


class TextFacts(Struct, frozen=True, kw_only=True):
    """What a checkpoint says about its text beside the vocabulary."""

    alphabet: Alphabet
    drops_first_space: bool = False
    """A text's first space was put there by the tokenizer and is not the text's."""
    bos_token: str = ""
    eos_token: str = ""
    eos_ids: frozenset[int] = frozenset()
    """Ids at which the model ends its turn."""
    chat_template: str | None = None


class _Pieces(dict[int, bytes]):
    """The bytes of ids, made when they are first asked for."""

    __slots__ = ("_made",)

    def __init__(self, made: Callable[[int], bytes]) -> None:
        self._made = made

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._made(token_id)
        return found


class Tokenizer:
    """Text to ids and ids to bytes.

    Thread: `encode` may be called from any thread and lets others run meanwhile;
    everything else belongs to one thread.
    """

    __slots__ = (
        "_keeps_text",
        "_longest",
        "_pipeline",
        "_special",
        "_spoken",
        "_unspelled",
        "facts",
        "pieces",
        "vocab_size",
    )

    def __init__(self, pipeline: tokenizers.Tokenizer, facts: TextFacts) -> None:
        added = pipeline.get_added_tokens_decoder()
        self._pipeline = pipeline
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._keeps_text = (
            facts.alphabet is Alphabet.BYTE_LEVEL
            and pipeline.normalizer is None
            and not any(token.lstrip or token.rstrip for token in added.values())
        )
        # A vocabulary need not spell every byte; what it lacks vanishes when text is encoded.
        self._unspelled = "".join(
            chr(byte) for byte in range(128) if pipeline.token_to_id(byte_piece(byte)) is None
        )
        self.pieces: Mapping[int, bytes] = _Pieces(self._piece)
        """The bytes that ids stand for; none for an id outside the vocabulary."""
        self._spoken: dict[frozenset[int], Mapping[int, bytes]] = {}
        # Now, and not with the first long prompt: it takes a while, and others want to be served.
        vocabulary = pipeline.get_vocab(with_added_tokens=True) if self._keeps_text else ()
        self._longest = max(
            (len(piece_bytes(piece, facts.alphabet)) for piece in vocabulary), default=0
        )
        self.facts = facts
        self.vocab_size: int = max(pipeline.get_vocab_size(), max(added, default=0) + 1)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return the ids of `text`; with `add_special`, inside what the model wants around it.

        Names of special tokens in the text become those tokens. A chat template
        writes the special tokens itself, so its text is encoded without.
        """
        # The batch call is the one that releases the GIL and skips computing offsets.
        encodings = self._pipeline.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encodings[0].ids
        return ids

    def write(self, directory: Path) -> None:
        """Write it as files that other programs read: tokenizer.json and its settings."""
        self._pipeline.save(str(directory / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.facts.bos_token or None,
            "eos_token": self.facts.eos_token or None,
            "chat_template": self.facts.chat_template,
        }
        (directory / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least, without tokenizing it.

        Zero where nothing can be said because the tokenizer rewrites text first.
        """
        if not self._longest:
            return 0
        spelled = len(text) - sum(map(text.count, self._unspelled))
        return spelled // self._longest

    def is_special(self, token_id: int) -> bool:
        """Whether the id marks structure and is no text."""
        return token_id in self._special

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those `texts` that are special tokens."""
        found = (self._pipeline.token_to_id(text) for text in texts)
        return frozenset(id_ for id_ in found if id_ in self._special)

    def spoken(self, shown: frozenset[int]) -> Mapping[int, bytes]:
        """Return the bytes of ids as text, in which of those that mark structure only `shown` are.

        There are few sets of these, so what is made for each is kept.
        """
        found = self._spoken.get(shown)
        if found is None:
            silent = self._special - shown
            found = _Pieces(lambda id_: b"" if id_ in silent else self.pieces[id_])
            self._spoken[shown] = found
        return found

    def piece(self, token_id: int) -> bytes:
        """Return the bytes the id stands for; none for an id outside the vocabulary."""
        return self.pieces[token_id]

    def _piece(self, token_id: int) -> bytes:
        text = self._pipeline.id_to_token(token_id)
        return b"" if text is None else piece_bytes(text, self.facts.alphabet)
