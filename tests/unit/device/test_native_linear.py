"""Layers of floats by native kernels, one at a time and a whole decoder in one call."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.core.gguf_file import TensorType
from drumline.device.kernels.native import Machine
from drumline.device.native_linear import NativeEmbedding, of_floats

from .conftest import native
from .test_models import PROMPT, Loaded, reference
from .test_stages import STEPS, through
from .test_weights import write_gguf

KINDS = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape, seed=1):
    """Return values that every kind of float holds as they are."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * 32).round() / 32


def biased(machine, kind, *, rows=80, columns=3112, paired=False):
    """Return a layer, and its weight and bias."""
    weight, bias = random(rows, columns), random(rows, seed=2)
    return of_floats(machine, weight.to(kind), bias, paired=paired), weight, bias


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("shape", [(80, 3112), (224, 64), (40, 8)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_layer_multiplies_by_its_weights(machine, kind, shape, paired):
    rows, columns = shape
    layer, weight, bias = biased(machine, kind, rows=rows, columns=columns, paired=paired)
    x = random(37, columns, seed=3)
    expected = x.double() @ weight.double().T + bias.double()
    assert (layer(x) - expected).abs().max() < 2e-6 * expected.abs().max()
    ids = torch.tensor([3, 0, rows - 1, 3])
    assert torch.equal(NativeEmbedding(layer)(ids), weight[ids])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_comes_to_the_same_bits_in_any_company(machine, kind):
    layer, _, _ = biased(machine, kind)
    x = torch.randn(300, 3112, generator=torch.Generator().manual_seed(4))
    expected, order = layer(x), np.random.default_rng(6)
    for count in [*range(1, 9), 127, 128, 129, 300]:
        rows = order.permutation(300)[:count]
        assert torch.equal(layer(x[rows]), expected[rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_no_number_stays_none_and_spares_its_neighbours(machine, kind, value):
    layer, _, _ = biased(machine, kind, columns=72)
    x = random(3, 72, seed=5)
    expected = layer(x)
    x[1, 40] = value
    made = layer(x)
    assert not made[1].isfinite().any()
    assert torch.equal(made[[0, 2]], expected[[0, 2]])


def test_weights_are_read_where_they_lie(machine):
    layer, weight, _ = biased(machine, torch.float32)
    x = random(2, 3112)
    before = layer(x)
    layer._keep[0].copy_(weight * 2)
    assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("family", ["llama, biased", "mistral", "qwen3"])
def test_one_call_in_bfloat16_is_as_near_to_float32_as_torch_is(checkpoint, machine, family):
    model, directory = checkpoint(family)
    expected = reference(model, PROMPT)
    whole = Loaded(directory, backend=native(machine), dtype=torch.bfloat16)
    assert whole.decoder.program is not None
    made = whole.feed([1], [0], [PROMPT])
    other = Loaded(directory, dtype=torch.bfloat16).feed([1], [0], [PROMPT])
    assert (made - expected).square().mean() < (other - expected).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [2, 3])
def test_a_forward_has_the_same_bits_on_any_number_of_threads(
    checkpoint, kernels, machine, threads, dtype
):
    _, directory = checkpoint("llama, biased")
    one = Loaded(directory, backend=native(machine), dtype=dtype)
    several = Loaded(directory, backend=native(Machine(kernels, threads)), dtype=dtype)
    # Many tokens, and a few, which every thread brings into form for itself.
    many = ([1, 2, 3], [0, 0, 0], [PROMPT[:1], PROMPT, PROMPT[5:38]])
    few = ([1, 3], [1, 33], [PROMPT[1:2], PROMPT[38:44]])
    for feeds in (many, few):
        assert torch.equal(several.feed(*feeds), one.feed(*feeds))


def test_stages_of_floats_return_the_whole_program_s_bits(checkpoint, machine):
    _, directory = checkpoint("llama, tied")
    how = {"backend": native(machine), "dtype": torch.bfloat16}
    whole = Loaded(directory, **how)
    stages = [Loaded(directory, **how, stage=stage, stages=2) for stage in range(2)]
    for step in STEPS:
        assert torch.equal(through(stages, *step), through([whole], *step))


FORMS = ["packed", torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=FORMS, ids=str)
def whole(request, checkpoint, machine, tmp_path_factory):
    """Return a function: family to a decoder that is computed in one call."""

    def of(family):
        model, path = checkpoint(family)
        dtype = request.param
        if dtype == "packed":
            path, dtype = tmp_path_factory.mktemp("gguf") / "model.gguf", torch.float32
            write_gguf(path, model, family, TensorType.Q4_1)
        loaded = Loaded(path, backend=native(machine), dtype=dtype)
        assert loaded.decoder.program is not None
        return loaded

    return of


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@given(data=st.data())
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_token_s_logits_have_the_same_bits_in_any_batch_and_chunk(whole, family, data):
    loaded = whole(family)
    random = np.random.default_rng(5)
    prompts = [random.integers(0, 320, length).astype(np.int32) for length in (64, 50, 33)]
    alone = [
        torch.cat([loaded.feed([1], [i], [prompt[i : i + 1]]) for i in range(len(prompt))])
        for prompt in prompts
    ]
    fed, got = [0, 0, 0], [[], [], []]
    while any(done < len(prompt) for done, prompt in zip(fed, prompts, strict=True)):
        running = [i for i in range(3) if fed[i] < len(prompts[i])]
        running = data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
        chunks = [
            prompts[i][fed[i] : fed[i] + data.draw(st.sampled_from([1, 2, 7, 16, 40]))]
            for i in running
        ]
        logits = loaded.feed([i + 1 for i in running], [fed[i] for i in running], chunks)
        for i, part in zip(running, logits.split([len(chunk) for chunk in chunks]), strict=True):
            got[i].append(part)
            fed[i] += len(part)
    for parts, expected in zip(got, alone, strict=True):
        assert torch.equal(torch.cat(parts), expected)
