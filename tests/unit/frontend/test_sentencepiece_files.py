"""A GGUF file of a SentencePiece model gives the ids that SentencePiece gives."""

import io
import random
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

from drumline.core.errors import ConfigError
from drumline.core.gguf_file import GgufFile
from drumline.core.model_files import ModelFiles, ModelFormat
from drumline.frontend.text.detokenizer import decode
from drumline.frontend.text.gguf_tokenizer import gguf_tokenizer
from drumline.grammar import vocabulary

SYLLABLES = ["ba", "ko", "ri", "the", "ing", "un", "ö", "tion", "e", "st", "an", "x1"]
TEXT = st.text(alphabet="aeiostnbkrhu x1ö 你,.\t\n\U0001f389", max_size=60) | st.text(max_size=40)


def trained(**options) -> sentencepiece.SentencePieceProcessor:
    """Return a small model trained on made-up words, as Llama's was on its text."""
    lots = random.Random(7)
    lines = [
        " ".join("".join(lots.choices(SYLLABLES, k=lots.randint(1, 4))) for _ in range(8)) + "."
        for _ in range(400)
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=480,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def as_gguf(model: sentencepiece.SentencePieceProcessor, **changes) -> GgufFile:
    def kind(id_: int) -> int:
        marks = (model.is_unknown, 2), (model.is_control, 3), (model.is_byte, 6)
        return next((number for is_one, number in marks if is_one(id_)), 1)

    ids = range(model.get_piece_size())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(id_) for id_ in ids],
        "tokenizer.ggml.scores": [model.get_score(id_) for id_ in ids],
        "tokenizer.ggml.token_type": [kind(id_) for id_ in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
    }
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return GgufFile(Path("small.gguf"), kept, {})


@pytest.fixture(scope="module")
def reference():
    return trained()


@pytest.fixture(scope="module")
def ours(reference):
    return gguf_tokenizer(as_gguf(reference))


def nameless(text: str) -> bool:
    """Whether a text spells no control token: SentencePiece takes their names for text."""
    return not any(name in text for name in ("<s>", "</s>", "<unk>"))


@given(text=TEXT.filter(nameless))
@example(text="")
@example(text=" ")
@example(text="  the  bako\n un ")
@example(text="\u2581the")
@example(text="你好 \U0001f389")
def test_every_text_gets_the_ids_of_the_model_and_comes_back(reference, ours, text):
    ids = ours.encode(text, add_special=False)
    assert ids == reference.encode(text)
    assert decode(ours, ids) == text.replace("\u2581", " ")


def test_without_a_dummy_prefix_none_is_put_before_a_text_or_taken_away():
    reference = trained(add_dummy_prefix=False)
    ours = gguf_tokenizer(as_gguf(reference, add_space_prefix=False))
    for text in ("the bako", " the", ""):
        ids = ours.encode(text, add_special=False)
        assert ids == reference.encode(text)
        assert decode(ours, ids) == text


def test_bos_stands_before_a_prompt_unless_the_file_forbids_it(reference, ours):
    plain = reference.encode("the bako")
    assert ours.encode("the bako", add_special=True) == [reference.bos_id(), *plain]
    without = gguf_tokenizer(as_gguf(reference, add_bos_token=False))
    assert without.encode("the bako", add_special=True) == plain


def test_control_tokens_are_read_by_their_names_and_are_no_text(reference, ours):
    ids = ours.encode("<s>the</s>", add_special=False)
    assert ids == [reference.bos_id(), *reference.encode("the"), reference.eos_id()]
    assert decode(ours, ids) == "the"
    assert ours.facts.eos_ids == {reference.eos_id()}


def test_a_grammar_sees_the_same_bytes(reference, ours, monkeypatch):
    monkeypatch.setattr(vocabulary, "read_gguf", lambda _: as_gguf(reference))
    files = ModelFiles("m", ModelFormat.GGUF, Path("small.gguf"))
    size = reference.get_piece_size()
    seen = vocabulary.read_vocabulary(files, size, (reference.eos_id(),))
    for id_ in range(size):
        structure = reference.is_control(id_) or reference.is_unknown(id_)
        assert seen.pieces[id_] == (b"" if structure else ours.piece(id_))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scores": None}, "tokenizer.ggml.scores"),
        ({"scores": [1.0]}, "no score for each of 480 tokens"),
        ({"scores": ["high"] * 480}, "no score for each of 480 tokens"),
        ({"remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces"),
        ({"precompiled_charsmap": [1, 2]}, "tokenizer.ggml.precompiled_charsmap"),
        ({"token_type": [1]}, "token_type"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(reference, changes, named):
    with pytest.raises(ConfigError, match=r"small\.gguf") as refused:
        gguf_tokenizer(as_gguf(reference, **changes))
    assert named in str(refused.value)
