"""Other weights while a rank serves: what takes their place, and what is refused by name."""

import numpy as np
import pytest
import safetensors.torch
import torch

from drumline.contract.regions import Region
from drumline.contract.weights import DiskWeights
from drumline.core.errors import InvariantError

from .conftest import Rig, random_model, small_config

PROMPT = np.arange(3, 40).astype(np.int32)


@pytest.fixture
def rig(checkpoint):
    rig = Rig(small_config(checkpoint("llama")[1]))
    yield rig
    rig.plane.shutdown()


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A checkpoint of the same shape and other weights."""
    directory = tmp_path_factory.mktemp("other")
    model = random_model("llama")
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    return directory


def head(rig):
    """Return the weights of the output head of what serves."""
    return rig.built.handle.weights._live.places["lm_head.weight"].out


def stored(directory):
    return safetensors.torch.load_file(directory / "model.safetensors")["lm_head.weight"]


def test_a_checkpoint_of_the_same_shape_takes_the_place_of_the_one_that_serves(
    rig, other, checkpoint
):
    before = head(rig)
    assert torch.equal(before, stored(checkpoint("llama")[1]))
    assert rig.plane.open_weights(DiskWeights(str(other))) is None
    assert rig.plane.load_weights() is None
    assert head(rig) is before, "nothing changes before all ranks agreed"
    rig.plane.settle_weights(True)
    assert torch.equal(head(rig), stored(other))
    # What serves now is what a release keeps.
    assert rig.plane.release_memory((Region.WEIGHTS,)) is None
    refused = rig.plane.open_weights(DiskWeights(str(other)))
    assert refused == "the weights are released; call resume_memory_occupation first"
    rig.plane.restore_memory((Region.WEIGHTS,))
    assert torch.equal(head(rig), stored(other))


def test_what_was_loaded_and_not_agreed_on_is_let_go(rig, other):
    before = head(rig)
    assert rig.plane.open_weights(DiskWeights(str(other))) is None
    assert rig.plane.load_weights() is None
    rig.plane.settle_weights(False)
    assert head(rig) is before
    with pytest.raises(InvariantError, match="taken that were not loaded"):
        rig.plane.settle_weights(True)


def test_what_cannot_be_served_in_its_place_is_refused_by_name(
    rig, other, checkpoint, tmp_path, monkeypatch
):
    def refused(path):
        fault = rig.plane.open_weights(DiskWeights(str(path)))
        assert fault is not None
        return fault

    assert "no existing directory or file" in refused(tmp_path / "nowhere")
    tied = checkpoint("llama, tied")[1]
    assert "tied_embeddings is True there, and False in what is served" in refused(tied)
    assert "head_dim is 32 there, and 16 in what is served" in refused(checkpoint("qwen3")[1])
    pickled = tmp_path / "model.bin"
    pickled.write_bytes(b"\x80\x04.")
    assert "pickled checkpoint, which can run any code" in refused(pickled)
    monkeypatch.setattr(rig.built.handle.weights._loader, "_available_bytes", lambda: 1 << 10)
    assert "0 MiB are available" in refused(other)


def test_a_file_that_is_cut_short_leaves_the_old_weights_serving(rig, other, tmp_path):
    before = head(rig)
    for file in other.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = safetensors.torch.load_file(other / "model.safetensors")
    del tensors["model.layers.2.input_layernorm.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    assert rig.plane.open_weights(DiskWeights(str(tmp_path))) is None
    assert "lacks the tensor model.layers.2.input_layernorm.weight" in rig.plane.load_weights()
    rig.plane.settle_weights(False)
    assert head(rig) is before
    # A matrix is missed before anything is made ready for it.
    del tensors["model.layers.2.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    refusal = rig.plane.open_weights(DiskWeights(str(tmp_path)))
    assert "lacks the tensor model.layers.2.mlp.up_proj.weight" in refusal
    assert head(rig) is before


def test_a_failed_load_does_not_end_the_forward_thread(rig, other):
    assert rig.plane.open_weights(DiskWeights("")) is not None
    rig.plane.settle_weights(False)
    assert rig.plane.open_weights(DiskWeights(str(other))) is None


def test_a_kv_cache_that_was_released_is_blank_and_may_be_written(rig):
    pool = rig.built.handle._pool
    for side in (*pool.keys, *pool.values):
        side.numbers.fill_(3)
    assert rig.plane.release_memory((Region.KV_CACHE,)) is None
    rig.plane.restore_memory((Region.KV_CACHE,))
    assert not any(side.numbers.any() for side in (*pool.keys, *pool.values))
    pool.keys[0].numbers[5].fill_(1)
    assert pool.bytes[5].any()
    assert not pool.bytes[4].any()


def test_weights_that_find_no_room_refuse_the_release_and_leave_all_there(rig, monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    pool = rig.built.handle._pool
    pool.keys[0].numbers.fill_(3)
    fault = rig.plane.release_memory((Region.WEIGHTS, Region.KV_CACHE))
    assert fault.startswith("no room to keep the weights in /")
    assert fault.endswith("No space left on device")
    assert pool.keys[0].numbers.all()
    assert head(rig).any()
