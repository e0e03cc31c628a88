"""The head of a GGUF file is read as it was written, or refused by name."""

import gguf
import numpy as np
import pytest

from drumline.core.errors import ConfigError
from drumline.core.gguf_file import BLOCKS, TensorType, read_gguf


@pytest.fixture
def small_gguf(tmp_path):
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bß", ""])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 1])
    writer.add_tensor("token_embd.weight", np.arange(24, dtype=np.float32).reshape(4, 6))
    writer.add_tensor("output_norm.weight", np.ones(6, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_read_as_written(small_gguf):
    file = read_gguf(small_gguf)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "bß", ""]
    assert file.metadata["tokenizer.ggml.token_type"] == [1, 3, 1]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is False
    entry = file.tensors["token_embd.weight"]
    assert (entry.type, entry.shape, entry.bytes) == (TensorType.F32, (4, 6), 96)
    stored = np.fromfile(small_gguf, np.float32, 24, offset=entry.offset)
    assert stored.tolist() == list(range(24))
    assert file.tensors["output_norm.weight"].type is TensorType.F16


def test_a_file_cut_at_any_byte_is_refused_by_name(small_gguf, tmp_path):
    whole = small_gguf.read_bytes()
    ends = [entry.offset + entry.bytes for entry in read_gguf(small_gguf).tensors.values()]
    cut = tmp_path / "cut.gguf"
    for size in range(max(ends)):
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_damage_anywhere_in_the_head_is_read_or_refused(small_gguf, tmp_path):
    whole = small_gguf.read_bytes()
    head = min(entry.offset for entry in read_gguf(small_gguf).tensors.values())
    damaged = tmp_path / "damaged.gguf"
    for position in range(head):
        damaged.write_bytes(whole[:position] + b"\xff" + whole[position + 1 :])
        try:
            read_gguf(damaged)
        except ConfigError as error:
            assert str(damaged) in str(error)  # noqa: PT017 (both outcomes are right)


def test_tensors_that_lie_on_each_other_are_refused_by_name(small_gguf):
    data = bytearray(small_gguf.read_bytes())
    name = b"output_norm.weight"
    # Behind a name stand the number of dimensions, the one there is, the type and the offset.
    place = data.index(name) + len(name) + 4 + 8 + 4
    data[place : place + 8] = (64).to_bytes(8, "little")
    small_gguf.write_bytes(data)
    with pytest.raises(ConfigError, match=r"tensor output_norm\.weight begins at byte .* another"):
        read_gguf(small_gguf)


def test_a_missing_key_is_named_with_its_file(small_gguf):
    with pytest.raises(ConfigError, match=r"small\.gguf: .* lacks llama\.context_length"):
        read_gguf(small_gguf).require("llama.context_length")


def test_block_sizes_are_those_of_the_format():
    for kind, size in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == size


def test_arrays_within_arrays_without_end_are_refused(tmp_path):
    path = tmp_path / "deep.gguf"
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little")
    entry = (1).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"a" + (9).to_bytes(4, "little")
    level = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    path.write_bytes(head + entry + level * 100_000)
    with pytest.raises(ConfigError, match=r"deep\.gguf"):
        read_gguf(path)
