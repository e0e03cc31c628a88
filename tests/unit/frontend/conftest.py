"""Tokenizers the tests of this room share."""

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from drumline.core.model_files import ModelFiles, ModelFormat, find_model
from drumline.frontend.text.load import load_tokenizer


@pytest.fixture(scope="session")
def embedded():
    """The embedded model's tokenizer."""
    return load_tokenizer(find_model(None))


@pytest.fixture(scope="session")
def space_marked(tmp_path_factory):
    """A small tokenizer as SentencePiece models have: marked spaces, bytes as a fallback."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"\u2581helowrd,.!", "ll", "\u2581w", "\u2581h", "lo"]
    merges = [("l", "l"), ("\u2581", "w"), ("\u2581", "h"), ("l", "o")]
    pipeline = tokenizers.Tokenizer(
        models.BPE(
            {piece: id_ for id_, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    pipeline.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    pipeline.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    pipeline.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True) for piece in pieces[:3]]
    )
    path = tmp_path_factory.mktemp("space_marked")
    pipeline.save(str(path / "tokenizer.json"))
    return load_tokenizer(ModelFiles("space-marked", ModelFormat.DIRECTORY, path))
