"""Weights that stay small integers, one layer at a time and a whole decoder in one call."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import safetensors.torch
import torch

from drumline.contract.weights import TensorWeights
from drumline.core.config import Config, ModelConfig
from drumline.core.gguf_file import TensorType, read_gguf
from drumline.core.model_files import find_model
from drumline.device.kernels.native import Machine
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.models.loading import load_decoder
from drumline.device.native_linear import NativeEmbedding, of_blocks
from drumline.device.parallel import Alone
from drumline.device.weights.gguf import GgufWeights
from drumline.device.weights.source import Cut, Span
from drumline.device.weights.store import WeightStore

from .conftest import Rig, native
from .test_models import PROMPT, Loaded
from .test_parallel import groups
from .test_serving_weights import seated, together
from .test_stages import STEPS, through
from .test_weights import write_gguf

KINDS = [TensorType.Q4_0, TensorType.Q4_1, TensorType.Q8_0]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def quantized(checkpoint, tmp_path_factory):
    """Return a function: family and kind of storage to a GGUF file of that model."""
    made = {}

    def of(family, kind=TensorType.Q4_1):
        if (family, kind) not in made:
            model, _ = checkpoint(family)
            path = tmp_path_factory.mktemp("gguf") / "model.gguf"
            architecture = family.split(",")[0]
            made[family, kind] = write_gguf(path, model, architecture, kind)
        return made[family, kind]

    return of


def apart(made, expected):
    """Return how far logits are from others, as a share of their size."""
    return float(((made - expected).square().mean() / expected.square().mean()).sqrt())


def stored(path, heads=4, kv_heads=2):
    return GgufWeights(read_gguf(path), heads=heads, kv_heads=kv_heads)


def rounded(x):
    """Return activations as the kernels round them."""
    blocks = x.double().view(len(x), -1, 32)
    step = blocks.abs().amax(2, keepdim=True) / 127
    return torch.where(step > 0, (blocks / step).round() * step, 0).view(x.shape)


NAME = "model.layers.1.self_attn.q_proj.weight"
CUTS = [None, Cut(0, Span(16, 48, 64)), Cut(1, Span(32, 64, 64))]


@pytest.mark.parametrize("cut", CUTS, ids=["all", "some outputs", "some inputs"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_packed_layer_multiplies_by_the_weights_of_its_file(machine, quantized, kind, cut):
    source = stored(quantized("llama", kind))
    # Columns are cut of what heads are read by, never of what makes them.
    name = NAME if cut is not CUTS[2] else "model.layers.1.self_attn.o_proj.weight"
    shape = {None: (64, 64), CUTS[1]: (32, 64), CUTS[2]: (64, 32)}[cut]
    weight = torch.empty(shape)
    source.read(name, weight, cut)
    linear = of_blocks(
        machine, [source.blocks(name, shape, cut)], None, WeightStore(torch.float32, CPU)
    )
    x = torch.randn(37, shape[1], generator=torch.Generator().manual_seed(1))
    expected = rounded(x) @ weight.double().T
    assert (linear(x) - expected).abs().max() < 1e-5 * expected.abs().max()
    ids = torch.tensor([3, 0, shape[0] - 1, 3])
    assert torch.equal(NativeEmbedding(linear)(ids), weight[ids])


@pytest.mark.parametrize("paired", [False, True])
def test_parts_lie_below_each_other_with_their_biases(machine, quantized, paired):
    source = stored(quantized("llama"))
    bias = torch.randn(128, generator=torch.Generator().manual_seed(2))
    parts = [
        source.blocks(f"model.layers.{layer}.self_attn.q_proj.weight", (64, 64)) for layer in (0, 2)
    ]
    store = WeightStore(torch.float32, CPU)
    both = of_blocks(machine, parts, bias, store, paired=paired)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    each = [of_blocks(machine, [part], None, store)(x) for part in parts]
    assert torch.equal(both(x), torch.cat(each, 1) + bias)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_comes_to_the_same_bits_in_any_company(machine, quantized, kind):
    blocks = stored(quantized("llama", kind)).blocks(NAME, (64, 64))
    linear = of_blocks(machine, [blocks], None, WeightStore(torch.float32, CPU))
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(4))
    expected, random = linear(x), np.random.default_rng(6)
    for count in [*range(1, 20), 127, 128, 129, 300]:
        rows = random.permutation(300)[:count]
        assert torch.equal(linear(x[rows]), expected[rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none_and_spares_its_neighbours(machine, quantized, value):
    source = stored(quantized("llama"))
    blocks = source.blocks(NAME, (64, 64))
    linear = of_blocks(machine, [blocks], None, WeightStore(torch.float32, CPU))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    expected = linear(x)
    x[1, 40] = value
    made = linear(x)
    assert not made[1].isfinite().any()
    assert torch.equal(made[[0, 2]], expected[[0, 2]])


def test_a_part_of_no_whole_blocks_is_none(quantized):
    source = stored(quantized("llama"))
    assert source.blocks(NAME, (64, 16), Cut(1, Span(16, 32, 64))) is None
    assert source.blocks(NAME, (64, 96)) is None
    assert source.blocks("model.layers.0.mlp.down_proj.weight", (64, 112)) is None
    assert source.blocks("model.layers.9.self_attn.q_proj.weight", (64, 64)) is None


class Whole(Loaded):
    """A decoder with native kernels, fed without plans."""

    def __init__(self, path, machine):
        super().__init__(path, Alone(), native(machine))


FAMILIES = ["llama", "llama, tied", "llama, rope llama3", "qwen2", "qwen3"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Return a function: family to a GGUF file whose every matrix is of whole blocks."""
    import transformers  # noqa: PLC0415

    from .conftest import FAMILIES as CONFIGS  # noqa: PLC0415

    made = {}

    def of(family):
        if family not in made:
            config = CONFIGS[family]()
            config.intermediate_size = 128
            torch.manual_seed(11)
            model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
            path = tmp_path_factory.mktemp("wide") / "model.gguf"
            made[family] = write_gguf(path, model, family.split(",")[0], TensorType.Q4_1)
        return made[family]

    return of


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_comes_to_what_single_layers_do(wide, machine, family):
    whole = Whole(wide(family), machine)
    assert whole.decoder.program is not None
    made = whole.feed([1, 2], [0, 0], [PROMPT, PROMPT[:9]])
    whole.decoder.program = None
    # A norm's last bit may make the next input another integer.
    assert apart(made, whole.feed([1, 2], [0, 0], [PROMPT, PROMPT[:9]])) < 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_is_near_the_model_whose_weights_are_floats(wide, machine, family):
    path = wide(family)
    made, exact = (
        Whole(path, machine).feed([1], [0], [PROMPT]),
        Loaded(path).feed([1], [0], [PROMPT]),
    )
    assert apart(made, exact) < 0.03


@pytest.mark.parametrize("threads", [2, 3])
def test_a_forward_has_the_same_bits_on_any_number_of_threads(wide, kernels, machine, threads):
    feeds = ([1, 2, 3], [0, 0, 0], [PROMPT[:1], PROMPT, PROMPT[5:38]])
    expected = Whole(wide("llama"), machine).feed(*feeds)
    several = Machine(kernels, threads)
    assert torch.equal(Whole(wide("llama"), several).feed(*feeds), expected)


@pytest.mark.parametrize("segments", [1, 3])
def test_a_forward_in_segments_has_the_same_bits(wide, machine, segments):
    whole = Whole(wide("llama"), machine)
    expected = whole.feed([1], [0], [PROMPT])
    batch = whole.batch([1], [0], [PROMPT])
    ids = torch.from_numpy(PROMPT.astype(np.int64))
    program = whole.decoder.program
    hidden = program.hidden(ids, batch, whole.attention.pool, segments=segments)
    assert torch.equal(program.logits(hidden), expected)


def test_a_forward_waits_for_each_layer_before_it_reads_it(wide, machine):
    whole = Whole(wide("llama"), machine)
    expected = whole.feed([1], [0], [PROMPT])
    waited = []

    class Fence:
        def wait(self, layer):
            waited.append(layer)

    ids = torch.from_numpy(PROMPT.astype(np.int64))
    batch = whole.batch([1], [0], [PROMPT])
    hidden = whole.decoder.hidden(ids, batch, whole.attention, Fence())
    assert waited == [0, 1, 2]
    assert torch.equal(whole.decoder.logits(hidden), expected)


@pytest.mark.parametrize("one_call", [True, False])
def test_what_is_not_stored_in_blocks_is_computed_in_floats(quantized, machine, caplog, one_call):
    # 112 inner values are no whole blocks: `down` is stored in half precision.
    path = quantized("llama", TensorType.Q8_0)
    mixed = Loaded(path, backend=native(machine, one_call=one_call))
    assert (mixed.decoder.program is not None) == one_call
    assert "3 matrices, such as model.layers.0.mlp.down_proj, became floats" in caplog.text
    made, exact = mixed.feed([1], [0], [PROMPT]), Loaded(path).feed([1], [0], [PROMPT])
    assert apart(made, exact) < 0.05


def test_blocks_become_floats_where_that_is_asked_for(wide, machine):
    path = wide("llama")
    floats = Loaded(path, backend=native(machine, packs=False))
    assert floats.decoder.program is not None
    made, exact = floats.feed([1], [0], [PROMPT]), Loaded(path).feed([1], [0], [PROMPT])
    assert apart(made, exact) < 1e-5


def test_ranks_that_share_packed_weights_return_the_same_bits_near_the_whole_model_s(wide, kernels):
    path = wide("llama")
    expected = Whole(path, Machine(kernels, 1)).feed([1], [0], [PROMPT])

    def run(group):
        return Loaded(path, group, native(Machine(kernels, 1), one_call=False)).feed(
            [1], [0], [PROMPT]
        )

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, groups(pool, 2))
    assert torch.equal(first, second)
    # Inputs are rounded in the same blocks, and sums meet in another order.
    assert apart(first, expected) < 0.02


@pytest.mark.parametrize("family", ["llama, tied", "qwen3"])
def test_stages_of_packed_weights_return_the_whole_program_s_bits(wide, machine, family):
    path = wide(family)
    expected = Whole(path, machine)
    stages = [Loaded(path, None, native(machine), stage=stage, stages=3) for stage in range(3)]
    assert all(part.decoder.program is not None for part in stages)
    for step in STEPS:
        assert torch.equal(through(stages, *step), through([expected], *step))


@pytest.mark.parametrize("family", ["llama", "llama, tied", "qwen2"])
@pytest.mark.parametrize("size", [1, 2])
def test_packed_weights_are_told_by_name_as_the_floats_they_stand_for(wide, machine, family, size):
    path = wide(family)
    members = [seated(path, index, size, native(machine)) for index in range(size)]
    opened = open_checkpoint(find_model(str(path)))
    names = {*members[0]._live.packed, *members[0]._live.places}
    assert NAME in members[0]._live.packed
    assert len(names) == 3 * 9 + 3 + 3 * 3 * (family == "qwen2")
    for name in names:
        shape = members[0].rows(name, 1).shape
        expected = torch.empty(shape)
        tied = family == "llama, tied" and name == "lm_head.weight"
        opened.weights.read("model.embed_tokens.weight" if tied else name, expected)
        assert torch.equal(together(members, name, 1000), expected), name
        assert torch.equal(together(members, name, 37), expected[:37]), name


def test_a_packed_weight_is_not_written_by_name(wide):
    device = Rig(Config(model=ModelConfig(model=str(wide("llama")))))
    try:
        update = TensorWeights(safetensors.torch.save({NAME: torch.zeros(64, 64)}))
        fault = device.plane.open_weights(update)
        assert fault.endswith("start with --quantization none, or update from a disk")
        assert device.plane.read_weight(NAME, 3).shape == (64, 64)
    finally:
        device.plane.shutdown()


def test_weights_that_were_away_are_where_the_kernels_look_for_them(wide, machine):
    whole = Whole(wide("llama"), machine)
    opened = open_checkpoint(find_model(str(wide("llama"))))
    store = WeightStore(torch.float32, CPU)
    whole.decoder, _ = load_decoder(opened.config, opened.weights, native(machine), store)
    expected = whole.feed([1], [0], [PROMPT])
    store.offload()
    store.restore()
    assert torch.equal(whole.feed([1], [0], [PROMPT]), expected)
