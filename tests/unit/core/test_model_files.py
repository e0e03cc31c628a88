"""A model's name stands for files, or for an error that says what was looked for."""

import errno
from pathlib import Path

import pytest

from drumline.core.errors import ConfigError
from drumline.core.gguf_file import read_gguf
from drumline.core.model_files import ModelFormat, find_model, read_json


def test_no_name_stands_for_the_embedded_model():
    files = find_model(None)
    assert files.embedded
    assert files.name == "SmolLM2-135M-Instruct"
    assert read_gguf(files.path).metadata["tokenizer.ggml.pre"] == "smollm"


def test_a_directory_needs_a_config_or_one_gguf_file(tmp_path):
    with pytest.raises(ConfigError, match="holds neither"):
        find_model(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert find_model(str(tmp_path)).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"a\.gguf, b\.gguf"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)).format is ModelFormat.DIRECTORY


def test_what_is_no_model_is_refused_by_name(tmp_path):
    for name, content, reason in [
        ("pytorch_model.bin", b"\x80\x02", "pickled"),
        ("model.safetensors", b"", "name its directory"),
        ("notes.txt", b"hello", "no GGUF file"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=reason) as caught:
            find_model(str(tmp_path / name))
        assert name in str(caught.value)
    for name in ("/no/such/thing", "a\0b", "n" * 300, "~nobody-at-all/model"):
        with pytest.raises(ConfigError) as caught:
            find_model(name)
        assert repr(name) in str(caught.value)


def test_a_place_without_access_is_refused_by_name(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        find_model(str(tmp_path))
    assert "Permission denied" in str(caught.value)


def test_a_hub_id_is_found_in_the_local_cache(tmp_path, monkeypatch):
    repo = tmp_path / "models--someone--tiny"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    files = find_model("someone/tiny")
    assert files.name == "someone/tiny"
    assert read_json(files.path / "config.json") == {"model_type": "llama"}
    with pytest.raises(ConfigError, match="someone/else is no existing directory"):
        find_model("someone/else")


def test_json_that_is_no_object_is_refused_by_name(tmp_path):
    file = tmp_path / "config.json"
    for content in (b"[1]", b"{", b"\xff", b'{"a":' * 100_000):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"config\.json"):
            read_json(file)
