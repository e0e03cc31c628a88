"""Graphs on a GPU come to what an ordinary forward makes, and replaying takes no memory."""

import numpy as np
import pytest
import torch
import transformers

from drumline.core.model_files import find_model
from drumline.device.attention import AttentionBatch, TorchAttention
from drumline.device.flashinfer_attention import FlashInferAttention, HeadShape
from drumline.device.flashinfer_trial import find_flashinfer
from drumline.device.graphs import CudaRecorder, DecodeGraphs
from drumline.device.kv import BlockShape, BlockTable, KvPool
from drumline.device.kv_form import KvForm
from drumline.device.layers import Backend, TorchLinear
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.models.loading import load_decoder
from drumline.device.weights.store import WeightStore

SIZES = (1, 2, 4, 8, 16)
PAGE, COLUMNS, ROWS = 16, 16, 16
DTYPE = torch.bfloat16


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch.manual_seed(7)
    config = transformers.MistralConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=448,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        sliding_window=50,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).to(DTYPE).save_pretrained(path)
    return path


class Model:
    """A decoder on a GPU, with a pool that holds a prompt for each row."""

    def __init__(self, directory, device, library):
        opened = open_checkpoint(find_model(str(directory)))
        config = opened.config
        self.device = device
        backend = Backend("torch", TorchLinear, TorchAttention)
        self.decoder, _ = load_decoder(config, opened.weights, backend, WeightStore(DTYPE, device))
        pool = KvPool(
            layers=config.layers,
            blocks=ROWS * COLUMNS + 1,
            block_tokens=PAGE,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            form=KvForm(DTYPE),
            device=device,
        )
        shape = HeadShape(
            config.heads, config.kv_heads, config.head_dim, frozenset(config.windows), DTYPE
        )
        self.attention = FlashInferAttention(library, pool, shape)
        self.attention.reserve(SIZES[-1], COLUMNS)
        self.table = BlockTable(ROWS + 1, COLUMNS)
        blocks = np.random.default_rng(2).permutation(np.arange(1, ROWS * COLUMNS + 1))
        for row in range(1, ROWS + 1):
            mine = blocks[(row - 1) * COLUMNS : row * COLUMNS].astype(np.int32)
            self.table.patch(np.full(COLUMNS, row, np.int32), np.arange(COLUMNS), mine)
        self.ends = {}
        for row in range(1, ROWS + 1):
            self.eager([row], np.full(3 * row, row), [3 * row])
        self.taken = []
        self.graphs = DecodeGraphs(
            SIZES,
            torch.zeros(SIZES[-1], dtype=torch.int64, device=device),
            torch.zeros(SIZES[-1], config.hidden_size, dtype=DTYPE, device=device),
            self.table,
            pool.shape,
            self.attention.prepare,
            lambda: self.counting(CudaRecorder(device)),
        )
        self.record()

    def counting(self, recorder):
        """Return a recorder whose recordings note how much memory each replay took."""

        def record(forward):
            replay = recorder(forward)

            def counted():
                before = self.allocations()
                replay()
                self.taken.append(self.allocations() - before)

            return counted

        return record

    def allocations(self):
        return torch.cuda.memory_stats(self.device)["allocation.all.allocated"]

    @torch.inference_mode()
    def record(self):
        self.graphs.record(lambda fed, batch: self.decoder.hidden(fed, batch, self.attention))

    @torch.inference_mode()
    def eager(self, rows, ids, lengths):
        prefixes = [self.ends.get(row, 0) for row in rows]
        numbers = (np.array(each, np.int32) for each in (rows, lengths, prefixes))
        batch = AttentionBatch(self.table, *numbers, self.attention.pool.shape, self.device)
        fed = torch.from_numpy(np.asarray(ids, np.int64)).to(self.device)
        for row, length in zip(rows, lengths, strict=True):
            self.ends[row] = self.ends.get(row, 0) + length
        return self.decoder.logits(self.decoder.hidden(fed, batch, self.attention))

    @torch.inference_mode()
    def replayed(self, rows, fed):
        prefixes = np.array([self.ends[row] for row in rows], np.int32)
        for row in rows:
            self.ends[row] += 1
        hidden = self.graphs.hidden(fed, np.array(rows, np.int32), prefixes)
        return self.decoder.logits(hidden)


@pytest.fixture
def models(directory, cuda):
    """Return two models that have read the same prompts."""
    shape = HeadShape(8, 2, 64, frozenset({50}), DTYPE)
    found = find_flashinfer(shape, PAGE, DTYPE, cuda)
    if found.why_none.startswith("is not installed"):
        pytest.skip(f"FlashInfer {found.why_none}")
    assert not found.why_none
    return tuple(Model(directory, cuda, found.library) for _ in range(2))


@torch.inference_mode()
def test_a_recorder_repeats_whatever_is_done_to_what_is_fed_now(cuda):
    """Needs no library, for it attends to nothing."""
    table = BlockTable(5, 4)
    table.patch(np.arange(1, 5), np.zeros(4, np.int32), np.arange(11, 15, dtype=np.int32))
    shape = BlockShape(PAGE, 2 * PAGE)
    graphs = DecodeGraphs(
        (1, 2, 4),
        torch.zeros(4, dtype=torch.int64, device=cuda),
        torch.zeros(4, 8, device=cuda),
        table,
        shape,
        lambda batch: None,
        lambda: CudaRecorder(cuda),
    )
    same = torch.eye(8, device=cuda)
    fed = (3, 1), (5, 3), (9, 2), (2, 4)

    def forward(ids, batch):
        told = ids + 100 * batch.positions + 1000 * batch.slots
        return told.float().unsqueeze(1).expand(-1, 8) @ same

    for _ in range(2):
        graphs.record(forward)
        torch.cuda.set_sync_debug_mode("error")
        try:
            made = [
                graphs.hidden(
                    torch.arange(step, step + rows, device=cuda),
                    np.arange(1, rows + 1, dtype=np.int32),
                    np.full(rows, step, np.int32),
                ).clone()
                for step, rows in fed
            ]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for each, (step, rows) in zip(made, fed, strict=True):
            slots = [(11 + row) * shape.rows + step for row in range(rows)]
            expected = [step + row + 100 * step + 1000 * slot for row, slot in enumerate(slots)]
            assert each[:, 3].tolist() == expected
        graphs.drop()
        torch.cuda.empty_cache()


def steps(count):
    random = np.random.default_rng(4)
    for step in range(count):
        rows = (random.permutation(ROWS)[: 1 + step % ROWS] + 1).tolist()
        yield rows, random.integers(0, 320, len(rows))


def test_replays_come_to_what_an_ordinary_forward_makes(models, cuda):
    graphed, eager = models
    for rows, ids in steps(32):
        got = graphed.replayed(rows, torch.from_numpy(ids).to(cuda))
        expected = eager.eager(rows, ids, [1] * len(rows))
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-2)
    assert not any(graphed.taken)


def test_steps_far_ahead_of_the_device_read_their_own_inputs(models, cuda):
    calm, hurried = models
    fed = [(rows, torch.from_numpy(ids).to(cuda)) for rows, ids in steps(48)]
    expected = []
    for rows, ids in fed:
        expected.append(calm.replayed(rows, ids))
        torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved(cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        # The device does nothing until all steps are queued.
        torch.cuda._sleep(2_000_000_000)
        made = [hurried.replayed(rows, ids) for rows, ids in fed]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, other in zip(made, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert torch.cuda.memory_reserved(cuda) - reserved < 64 << 20


def test_what_was_recorded_anew_reads_other_weights(models, cuda, directory):
    graphed, eager = models
    graphed.graphs.drop()
    for model in models:
        for layer in model.decoder._layers:
            layer._mlp_norm.weight = layer._mlp_norm.weight * 1.5
    graphed.record()
    ids = np.array([7, 8, 9])
    got = graphed.replayed([1, 2, 3], torch.from_numpy(ids).to(cuda))
    torch.testing.assert_close(got, eager.eager([1, 2, 3], ids, [1, 1, 1]), rtol=0, atol=5e-2)
    for _ in range(5):
        graphed.record()
    held = torch.cuda.memory_reserved(cuda)
    for _ in range(5):
        graphed.record()
    assert torch.cuda.memory_reserved(cuda) <= held
