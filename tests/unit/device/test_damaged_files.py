"""A model's files, damaged anywhere in their heads, are read or refused by name."""

import os
import shutil
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.core.errors import ConfigError
from drumline.core.gguf_file import read_gguf

from .test_models import Loaded
from .test_weights import write_gguf

EXAMPLES = int(os.environ.get("DRUMLINE_SOAK_DAMAGES", "60"))
SIZES = [0, 1, 8, 64, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
SPOTS = st.integers(0, 1 << 20)
DAMAGES = st.lists(
    st.one_of(
        st.tuples(st.just("bytes"), SPOTS, st.binary(min_size=1, max_size=4)),
        st.tuples(st.just("bytes"), SPOTS, st.sampled_from(SIZES).map(struct.Struct("<Q").pack)),
        st.tuples(st.just("inserted"), SPOTS, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("left out"), SPOTS, st.binary(min_size=1, max_size=32)),
        st.tuples(st.just("cut"), SPOTS, st.just(b"")),
    ),
    min_size=1,
    max_size=3,
)


def damaged(data, head, damages):
    """Return `data`, whose first `head` bytes say what is in it, with some harm done to those."""
    for kind, spot, said in damages:
        at = spot % head
        match kind:
            case "bytes":
                data = data[:at] + said + data[at + len(said) :]
            case "inserted":
                data = data[:at] + said + data[at:]
            case "left out":
                data = data[:at] + data[at + len(said) :]
            case _:
                data = data[:at]
    return data


@pytest.fixture(scope="module", params=["gguf", "safetensors"])
def files(request, checkpoint, tmp_path_factory):
    """Return a model, the file of it that is damaged, and how long that one's head is."""
    model, whole = checkpoint("llama")
    directory = tmp_path_factory.mktemp("damaged")
    if request.param == "gguf":
        file = directory / "model.gguf"
        write_gguf(file, model, "llama")
        head = min(entry.offset for entry in read_gguf(file).tensors.values())
        return file, file, head
    shutil.copytree(whole, directory, dirs_exist_ok=True)
    file = directory / "model.safetensors"
    return directory, file, 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(damages=DAMAGES)
def test_what_is_damaged_is_read_or_refused_by_name(files, damages):
    model, file, head = files
    whole = file.read_bytes()
    # Another file, as some of the bytes may be mapped.
    file.unlink()
    file.write_bytes(damaged(whole, head, damages))
    try:
        Loaded(model)
    except ConfigError as error:
        assert str(model) in str(error)  # noqa: PT017 (both outcomes are right)
    finally:
        file.unlink()
        file.write_bytes(whole)
