"""A tokenizer read from a model directory: tokenizer.json and what stands beside it."""

from pathlib import Path
from typing import Any

import tokenizers

from drumline.core.errors import ConfigError
from drumline.core.model_files import read_json
from drumline.core.pieces import Alphabet
from drumline.frontend.text.tokenizer import TextFacts, Tokenizer


def directory_tokenizer(path: Path) -> Tokenizer:
    """Build the tokenizer of the model directory `path`.

    Raises ConfigError naming the file that is missing or not understood.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(str(path), "has no tokenizer.json; other tokenizer files are not read")
    try:
        pipeline = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(str(file), f"holds no tokenizer: {error}") from error
    pipeline.no_truncation()
    pipeline.no_padding()
    alphabet, drops_first_space = _decoding(file, read_json(file).get("decoder"))
    settings = _optional(path / "tokenizer_config.json")
    eos = _token_text(settings.get("eos_token"))
    eos_ids = _ids(_optional(path / "generation_config.json").get("eos_token_id"))
    eos_ids |= _ids(_optional(path / "config.json").get("eos_token_id"))
    eos_id = pipeline.token_to_id(eos) if eos else None
    return Tokenizer(
        pipeline,
        TextFacts(
            alphabet=alphabet,
            drops_first_space=drops_first_space,
            bos_token=_token_text(settings.get("bos_token")),
            eos_token=eos,
            eos_ids=frozenset(eos_ids | ({eos_id} if eos_id is not None else set())),
            chat_template=_chat_template(path, settings.get("chat_template")),
        ),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _decoding(file: Path, decoder: Any) -> tuple[Alphabet, bool]:
    """Return the alphabet of the pieces and whether a text's first space is dropped."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Alphabet.BYTE_LEVEL, False
    if kinds == ["Metaspace"]:
        return Alphabet.SPACE_MARKS, steps[0].get("prepend_scheme", "always") != "never"
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return Alphabet.SPACE_MARKS, "Strip" in kinds
    raise ConfigError(str(file), f"has the decoder {kinds or None}, which is not supported")


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _steps(part)]
    return [decoder]


def _token_text(token: Any) -> str:
    """Return a token's text, which files give as itself or inside an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {id_ for id_ in values if isinstance(id_, int)}


def _chat_template(path: Path, configured: Any) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(str(file), f"cannot be read: {error}") from error
    if isinstance(configured, list):  # several by name
        named = [entry for entry in configured if isinstance(entry, dict)]
        default = (entry.get("template") for entry in named if entry.get("name") == "default")
        configured = next(default, None)
    return configured if isinstance(configured, str) else None
