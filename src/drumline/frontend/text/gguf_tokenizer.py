"""A tokenizer built from the arrays of a GGUF file.

Two kinds of them: `gpt2` merges bytes by a list of pairs, `llama` (SentencePiece) merges
characters into the piece of the highest score. The former names how text is split before
merging (`tokenizer.ggml.pre`); splitting it differently gives other ids for the same text,
so a name that is not known here is refused instead of guessed.
"""

from typing import Any

import tokenizers
from msgspec import Struct
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from drumline.core.errors import ConfigError
from drumline.core.gguf_file import GgufFile
from drumline.core.pieces import Alphabet
from drumline.frontend.text.tokenizer import TextFacts, Tokenizer

_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_BYTE = 6

_SPACE_MARK = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class _Splitting(Struct, frozen=True):
    """How text is cut before merging: each pattern cuts what the one before left whole."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token as it stands is not merged up to."""
    adds_bos: bool = False
    """Whether a prompt begins with BOS where the file does not say."""
    normalizes: bool = False
    """Text is brought to Unicode NFC first."""


_DIGIT_WISE = _Splitting((r"\p{N}", _GPT2))
_WHOLE = _Splitting((_GPT2,))
_LLAMA = _Splitting((_LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN = _Splitting((_QWEN2,), normalizes=True)

_SPLITTINGS = {
    "smollm": _DIGIT_WISE,
    "starcoder": _DIGIT_WISE,
    "refact": _DIGIT_WISE,
    "command-r": _DIGIT_WISE,
    "codeshell": _DIGIT_WISE,
    "gpt-2": _WHOLE,
    "phi-2": _WHOLE,
    "mpt": _WHOLE,
    "olmo": _WHOLE,
    "llama-bpe": _LLAMA,
    "llama-v3": _LLAMA,
    "llama3": _LLAMA,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Build the tokenizer that the metadata of `file` describes.

    Raises ConfigError naming the file and the entry when the kind of tokenizer is not
    known or its arrays do not fit together.
    """
    metadata = file.metadata
    tokens = _strings(file, "tokenizer.ggml.tokens")
    match file.require("tokenizer.ggml.model"):
        case "gpt2":
            alphabet = Alphabet.BYTE_LEVEL
            pipeline, adds_bos, drops_first_space = _byte_level(file, tokens)
        case "llama":
            alphabet = Alphabet.SPACE_MARKS
            pipeline, adds_bos, drops_first_space = _space_marked(file, tokens)
        case kind:
            raise _refused(
                file, f"tokenizer.ggml.model {kind!r} is not supported; 'gpt2' and 'llama' are"
            )
    _add_special(file, tokens, pipeline)

    bos, eos = _token(file, tokens, "bos"), _token(file, tokens, "eos")
    _surround(file, pipeline, bos, eos, adds_bos=adds_bos)
    turn_ends = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        pipeline,
        TextFacts(
            alphabet=alphabet,
            drops_first_space=drops_first_space,
            bos_token=bos,
            eos_token=eos,
            eos_ids=frozenset(end for end in turn_ends if isinstance(end, int)),
            chat_template=template if isinstance(template, str) else None,
        ),
    )


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool, bool]:
    """Return a pipeline that merges bytes, whether BOS is usual, and that no space is added."""
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    splitting = _SPLITTINGS.get(name)
    if splitting is None:
        raise _refused(
            file, f"tokenizer.ggml.pre {name!r} is not known; known: {', '.join(_SPLITTINGS)}"
        )
    pipeline = tokenizers.Tokenizer(_merging(file, tokens, splitting))
    if splitting.normalizes:
        pipeline.normalizer = normalizers.NFC()
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(Regex(pattern), behavior="isolated")
                for pattern in splitting.patterns
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pipeline.decoder = decoders.ByteLevel()
    return pipeline, splitting.adds_bos, False


def _space_marked(file: GgufFile, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool, bool]:
    """Return a pipeline that merges characters by score, whether BOS is usual, and whether
    a space is put before a text.
    """
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if file.metadata.get(f"tokenizer.ggml.{key}"):
            raise _refused(file, f"tokenizer.ggml.{key} rewrites text, which is not supported")
    kinds = _kinds(file, tokens)
    unknown = next(
        (token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None
    )
    spaced = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    pipeline = tokenizers.Tokenizer(
        models.BPE(
            {token: id_ for id_, token in enumerate(tokens)},
            _merges_by_score(file, tokens, kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in kinds,
        )
    )
    marking = [normalizers.Replace(" ", _SPACE_MARK)]
    pipeline.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE_MARK), *marking] if spaced else marking
    )
    return pipeline, True, spaced


def _merges_by_score(file: GgufFile, tokens: list[str], kinds: list[int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, those of the highest score first."""
    key = "tokenizer.ggml.scores"
    scores = file.require(key)
    numbers = isinstance(scores, list) and all(isinstance(each, int | float) for each in scores)
    if not numbers or len(scores) != len(tokens):
        raise _refused(file, f"{key} has no score for each of {len(tokens)} tokens")
    ids = {
        token: id_
        for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _NORMAL
    }
    found = [
        (-scores[id_], ids[left], ids[right], left, right)
        for token, id_ in ids.items()
        for cut in range(1, len(token))
        if (left := token[:cut]) in ids and (right := token[cut:]) in ids
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _refused(file: GgufFile, reason: str) -> ConfigError:
    return ConfigError(str(file.path), reason)


def _strings(file: GgufFile, key: str) -> list[str]:
    values = file.require(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise _refused(file, f"{key} is no array of strings")
    return values


def _merging(file: GgufFile, tokens: list[str], splitting: _Splitting) -> models.BPE:
    key = "tokenizer.ggml.merges"
    merges: list[tuple[str, str]] = []
    for merge in _strings(file, key):
        left, space, right = merge.partition(" ")
        if not space:
            raise _refused(file, f"{key} holds {merge!r}, which is no pair of tokens")
        merges.append((left, right))
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    try:
        return models.BPE(vocabulary, merges, ignore_merges=splitting.ignore_merges)
    except Exception as error:  # the library raises nothing narrower
        raise _refused(file, f"{key} and tokenizer.ggml.tokens do not fit: {error}") from error


def _kinds(file: GgufFile, tokens: list[str]) -> list[int]:
    """Return the type of each token; of a file that names none, all are normal."""
    kinds: Any = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list) or len(kinds) not in (0, len(tokens)):
        raise _refused(
            file, f"tokenizer.ggml.token_type does not name a type for each of {len(tokens)} tokens"
        )
    return kinds or [_NORMAL] * len(tokens)


def _add_special(file: GgufFile, tokens: list[str], pipeline: tokenizers.Tokenizer) -> None:
    kinds = _kinds(file, tokens)
    pipeline.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL
        ]
    )
    pipeline.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _USER_DEFINED
        ]
    )


def _token(file: GgufFile, tokens: list[str], name: str) -> str:
    key = f"tokenizer.ggml.{name}_token_id"
    id_ = file.metadata.get(key)
    if id_ is None:
        return ""
    if not isinstance(id_, int) or not 0 <= id_ < len(tokens):
        raise _refused(file, f"{key} {id_!r} is none of the {len(tokens)} tokens")
    return tokens[id_]


def _surround(
    file: GgufFile, pipeline: tokenizers.Tokenizer, bos: str, eos: str, *, adds_bos: bool
) -> None:
    """Let the pipeline put BOS before and EOS behind a prompt where the file asks for it."""
    before = bos if file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else ""
    behind = eos if file.metadata.get("tokenizer.ggml.add_eos_token", False) else ""
    around = {token: pipeline.token_to_id(token) for token in (before, behind) if token}
    if around:
        pipeline.post_processor = processors.TemplateProcessing(
            single=[part for part in (before, "$A", behind) if part],
            special_tokens=list(around.items()),
        )
