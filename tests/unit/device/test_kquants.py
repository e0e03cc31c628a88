"""Formats whose blocks are not the kernels' own: K-quants and 5 bits, as small integers."""

import logging
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
import transformers

from drumline.contract.weights import DiskWeights
from drumline.core.config import Config, ModelConfig, Quantization
from drumline.core.errors import ConfigError
from drumline.core.gguf_file import BLOCKS, TensorType
from drumline.core.model_files import find_model
from drumline.device.blocks import whole
from drumline.device.budget import available_bytes
from drumline.device.kernels.native import BYTES, NIBBLES, OFFSET_BYTES, Machine
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.models.shard import shard_of
from drumline.device.native_linear import NativeEmbedding, of_blocks
from drumline.device.parallel import Alone
from drumline.device.weight_loader import WeightLoader
from drumline.device.weights.dequantize import decoded
from drumline.device.weights.repack import kind_of, repacked
from drumline.device.weights.source import Cut, Span, StoredBlocks
from drumline.device.weights.store import WeightStore

from .conftest import SIZES, Rig, native
from .kquants import K_QUANTS, quantize
from .test_models import PROMPT, Loaded
from .test_packed import Whole, apart, rounded, stored
from .test_parallel import groups
from .test_weights import SCALES, write_gguf

Q2, Q3, Q4, Q5, Q6 = sorted(K_QUANTS)
KINDS = [Q2, Q3, Q4, Q5, Q6, TensorType.Q5_0, TensorType.Q5_1]
ROUNDED_AGAIN = {Q2, Q3, Q6}
CPU = torch.device("cpu")
HALF_BIT = 2.0**-11
"""How far float16 is from what it rounds at most, as a share of it."""


def named(kind):
    return kind.name


def dequantized(raw, kind):
    return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType(kind))).double()


def bound(raw, kind):
    """Return how far small integers may be from the values of blocks, `[blocks, values]`."""
    size = BLOCKS[kind][1]
    values = dequantized(raw, kind).reshape(-1, 32)
    float32 = 1e-6 * values.abs().amax(1, keepdim=True)
    if kind in ROUNDED_AGAIN:
        steps = values.abs().amax(1, keepdim=True) / 127 * (1 + 2 * HALF_BIT) + 2.0**-24
        return (steps / 2 + float32).expand(-1, 32).reshape(-1, BLOCKS[kind][0])
    if kind not in {Q4, Q5}:
        return float32.expand(-1, 32)
    integers, scale, least = decoded(torch.from_numpy(raw).view(-1, size), kind)
    error = HALF_BIT * (
        integers * scale.double().abs() * (scale.abs() > 2.0**-13)
    ) + HALF_BIT * least.double().abs() * (least.abs() > 2.0**-13)
    return error.reshape(-1, 256) + float32.expand(-1, 32).reshape(-1, 256)


def random_blocks(kind, count, scale):
    random = np.random.default_rng(kind)
    raw = random.integers(0, 256, (count, BLOCKS[kind][1]), dtype=np.uint8)
    for offset in SCALES[kind]:
        scales = (scale * random.standard_normal(count)).astype(np.float16)
        raw[:, offset : offset + 2] = scales.view(np.uint8).reshape(count, 2)
    return raw


def read_back(blocks, kind):
    """Return the values of blocks of a kind of packed weights, `[..., blocks, bytes]`."""
    floats = 2 if kind == BYTES else 4
    scale, *least = blocks[..., :floats].contiguous().view(torch.float16).double().split(1, -1)
    integers = blocks[..., floats:].contiguous()
    if kind == NIBBLES:
        integers = torch.cat((integers & 15, integers >> 4), -1)
    return integers.view(torch.int8) * scale + (least[0] if least else 0)


@pytest.mark.parametrize("scale", [0.01, 1e-6])
@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_blocks_are_repacked_within_what_their_format_allows(kind, scale):
    values, size = BLOCKS[kind]
    columns, rows = 4 * values, 700
    raw = random_blocks(kind, 4 * rows, scale)
    raw[5] = 0
    offsets = np.arange(rows, dtype=np.int64)[::-1] * 4 * size
    for packed in {kind_of([kind]), OFFSET_BYTES}:
        part = StoredBlocks(kind, raw.reshape(-1), offsets, columns)
        pieces = list(repacked(part, packed))
        made = read_back(torch.cat(pieces), packed).reshape(rows, columns).flip(0)
        exact = dequantized(raw, kind).reshape(rows, columns)
        assert ((made - exact).abs() <= bound(raw, kind).reshape(rows, columns)).all()


def test_types_have_the_smallest_kind_that_holds_them():
    assert kind_of([Q4, TensorType.Q4_0, TensorType.Q4_1]) == NIBBLES
    assert kind_of([TensorType.Q5_0, Q2, Q3, Q6, TensorType.Q8_0]) == BYTES
    assert kind_of([Q5, TensorType.Q5_1]) == OFFSET_BYTES
    assert kind_of([Q4, Q6]) == kind_of([Q5, Q6]) == kind_of([TensorType.Q4_0, Q5]) == OFFSET_BYTES


@pytest.mark.parametrize("kind", [Q4, Q5, Q6], ids=named)
def test_scales_beyond_float16_are_refused(kind):
    raw = np.full((1, BLOCKS[kind][1]), 63, np.uint8)
    for offset in SCALES[kind]:
        raw[:, offset : offset + 2] = np.array([60000], np.float16).view(np.uint8)
    part = StoredBlocks(kind, raw.reshape(-1), np.zeros(1, np.int64), 256)
    with pytest.raises(ConfigError, match=f"{kind.name} .*--quantization none"):
        list(repacked(part, kind_of([kind])))


def test_a_weight_that_is_no_number_stays_none_and_spares_its_neighbours():
    raw = quantize(np.ones((2, 256), np.float32), Q6)
    raw[1, -2:] = np.array([np.nan], np.float16).view(np.uint8)
    rows = np.arange(2, dtype=np.int64) * raw.shape[1]
    made = read_back(next(repacked(StoredBlocks(Q6, raw.reshape(-1), rows, 256), BYTES)), BYTES)
    assert made[0].isfinite().all()
    assert made[1].isnan().all()


# Whole models


def mixed(name):
    """Return how a matrix is stored in files of 4-bit K-quants, as quantizers mix them."""
    if name == "output.weight" or ("blk.0" in name and ("attn_v" in name or "ffn_down" in name)):
        return Q6
    return Q4


def mixed_5(name):
    return {Q4: Q5, Q6: Q6}[mixed(name)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a function: how matrices are stored to a GGUF file whose rows are of whole blocks."""
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    torch.manual_seed(11)
    config = transformers.LlamaConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    made = {}

    def of(stored_as):
        if stored_as not in made:
            path = tmp_path_factory.mktemp("kquants") / "model.gguf"
            made[stored_as] = write_gguf(path, model, "llama", stored_as)
        return made[stored_as]

    return of


QUERY, VALUE = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qv")
DOWN = "model.layers.0.mlp.down_proj.weight"
SHAPES = {QUERY: (256, 256), VALUE: (128, 256), DOWN: (256, 512)}


def floats(source, name, cut=None):
    """Return a weight as floats, and how far small integers may be from each."""
    weight = torch.empty(SHAPES[name])
    source.read(name, weight)
    part = source.blocks(name, SHAPES[name])
    rows = part.offsets[:, None] + np.arange(
        part.columns // BLOCKS[part.kind][0] * BLOCKS[part.kind][1]
    )
    errors = bound(part.data[rows].reshape(-1, BLOCKS[part.kind][1]), part.kind)
    return [
        each.reshape(weight.shape)
        if cut is None
        else each.reshape(weight.shape)[:, cut.span.start : cut.span.stop]
        for each in (weight.double(), errors)
    ]


@pytest.mark.parametrize("cut", [None, Cut(1, Span(160, 448, 512))], ids=["all", "some inputs"])
@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_a_layer_multiplies_by_what_its_file_holds(machine, files, kind, cut):
    source = stored(files(kind))
    exact, errors = floats(source, DOWN, cut)
    part = source.blocks(DOWN, tuple(exact.shape), cut)
    layer = of_blocks(machine, [part], None, WeightStore(torch.float32, CPU))
    weight = NativeEmbedding(layer)(torch.arange(256)).double()
    assert ((weight - exact).abs() <= errors).all()
    x = torch.randn(37, exact.shape[1], generator=torch.Generator().manual_seed(1))
    expected = rounded(x) @ weight.T
    assert (layer(x) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(layer(x[3:4]), layer(x)[3:4])


def test_parts_of_several_types_are_one_layer_that_loses_no_more_than_each_alone(machine, files):
    source = stored(files(mixed))
    parts = [source.blocks(name, SHAPES[name]) for name in (QUERY, VALUE)]
    assert [part.kind for part in parts] == [Q4, Q6]
    layer = of_blocks(machine, parts, None, WeightStore(torch.float32, CPU))
    weight = NativeEmbedding(layer)(torch.arange(384)).double()
    exact, errors = (
        torch.cat(each) for each in zip(floats(source, QUERY), floats(source, VALUE), strict=True)
    )
    assert ((weight - exact).abs() <= errors).all()


@pytest.mark.parametrize("cut", [Span(16, 272, 512), Span(0, 240, 512)])
def test_a_part_that_begins_or_ends_within_32_values_is_none(files, cut):
    shape = 256, len(cut)
    assert stored(files(Q4)).blocks(DOWN, shape, Cut(1, cut)) is None


@pytest.mark.parametrize("how", [*KINDS, mixed, mixed_5], ids=lambda how: getattr(how, "name", how))
def test_a_forward_is_near_that_of_floats(machine, files, caplog, how):
    path = files(how)
    with caplog.at_level(logging.INFO):
        packed = Whole(path, machine)
    assert packed.decoder.program is not None
    assert "became floats" not in caplog.text
    assert apart(packed.feed([1], [0], [PROMPT]), Loaded(path).feed([1], [0], [PROMPT])) < 0.03


def test_the_log_says_what_became_of_each_type(machine, files, caplog):
    with caplog.at_level(logging.INFO):
        Whole(files(mixed), machine)
    assert (
        "small integers: 11 of Q4_K as 4 bits; 2 of Q4_K as 8 bits above a minimum; 1 of Q6_K as "
        "8 bits above a minimum, rounded again; 2 of Q6_K as 8 bits, rounded again"
    ) in caplog.text


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_what_lies_within_a_block_of_256(kernels, files, size):
    path = files(mixed)
    expected = Whole(path, Machine(kernels, 1)).feed([1], [0], [PROMPT])

    def run(group):
        part = Loaded(path, group, native(Machine(kernels, 1), one_call=False))
        return part.feed([1], [0], [PROMPT])

    with ThreadPoolExecutor(size) as pool:
        first, *others = pool.map(run, groups(pool, size))
    assert all(torch.equal(first, other) for other in others)
    assert apart(first, expected) < 0.02


@pytest.mark.parametrize("how", [mixed, TensorType.Q4_0, Q5], ids=["mixed", "Q4_0", "Q5_K"])
def test_the_memory_that_weights_take_is_told_before_they_are_read(machine, files, how):
    checkpoint = open_checkpoint(find_model(str(files(how))))

    def loader(index, size):
        return WeightLoader(
            checkpoint.config,
            native(machine),
            torch.float32,
            CPU,
            Alone(),
            whole,
            available_bytes,
            shard_of(checkpoint.config, index, size),
        )

    told = loader(0, 1).bytes_of(checkpoint)
    store = loader(0, 1).load(checkpoint).store
    norms = 5 * 256 * 4
    assert told == sum(store._used) - norms
    assert told == sum(loader(index, 2).bytes_of(checkpoint) for index in range(2))


def test_a_file_of_other_types_takes_the_place_of_what_serves(files, tmp_path):
    device = Rig(Config(model=ModelConfig(model=str(files(Q4)), quantization=Quantization.GGUF)))
    try:
        plane = device.plane
        before = plane.read_weight(DOWN, 256)
        assert device.built.specs.backend.endswith("kernels, weights in small integers")
        assert plane.open_weights(DiskWeights(str(files(mixed)))) is None
        assert plane.load_weights() is None
        plane.settle_weights(True)
        after = plane.read_weight(DOWN, 256)
    finally:
        device.plane.shutdown()
    shown = [
        torch.frombuffer(bytearray(each.data), dtype=torch.float32).view(256, 512)
        for each in (before, after)
    ]
    for how, weight in zip((Q4, mixed), shown, strict=True):
        exact, errors = floats(stored(files(how)), DOWN)
        assert ((weight - exact).abs() <= errors).all()
    assert not torch.equal(*shown)
