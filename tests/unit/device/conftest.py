"""Small models of every family, and a device that a test feeds by hand."""

import os
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
import transformers

from drumline.contract.plan import Batch, Bound, Plan, TablePatch, decode_plan, encode_plan
from drumline.contract.ports import Dispatch
from drumline.contract.request import Admission, Sampling
from drumline.core.config import CacheConfig, Config, Dtype, ModelConfig, ScheduleConfig
from drumline.device.build import build
from drumline.device.data_plane import QueuedDataPlane
from drumline.device.forward_thread import ForwardThread
from drumline.device.kernels.native import Machine, find_kernels
from drumline.device.kernels.trial import tried
from drumline.device.layers import Backend, TorchLinear
from drumline.device.native_attention import NativeAttention

from .emulated_cuda import emulated, load_guard

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GREEDY = Sampling(top_k=1)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama, tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, biased": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, rope llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama, rope linear": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=24),
    "mistral, window": lambda: transformers.MistralConfig(**SIZES, sliding_window=20),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2, some windows": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
}


def random_model(family):
    """Return a `transformers` model of random weights, norms and biases included."""
    model = transformers.AutoModelForCausalLM.from_config(
        FAMILIES[family](), attn_implementation="eager"
    ).float()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model.eval()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return a function: family to (its `transformers` model, a directory with its files)."""
    torch.set_num_threads(1)
    made = {}

    def of(family):
        if family not in made:
            directory = tmp_path_factory.mktemp("model")
            model = random_model(family)
            model.save_pretrained(directory)
            made[family] = (model, directory)
        return made[family]

    return of


@pytest.fixture(scope="session")
def kernels():
    found = find_kernels(tried)
    assert found.kernels is not None, found.why_none
    return found.kernels


@pytest.fixture(scope="session")
def machine(kernels):
    return Machine(kernels, 1)


def native(machine, *, packs=True, one_call=True):
    return Backend(
        "native",
        TorchLinear,
        lambda pool: NativeAttention(pool, machine),
        machine,
        packs=packs,
        one_call=one_call,
    )


def ints(*values):
    return np.array(values, np.int32)


def small_config(model, *, pages=64, **changes):
    return Config(
        model=ModelConfig(
            model=str(model), device="cpu", dtype=changes.pop("dtype", Dtype.FLOAT32)
        ),
        cache=CacheConfig(max_total_tokens=16 * (pages - 1), **changes),
        schedule=ScheduleConfig(max_num_seqs=8),
    )


class Rig:
    """A device and its data plane, and the little a scheduler must do to feed it."""

    def __init__(self, config, thread=None, device=None):
        self.thread = thread or ForwardThread()
        try:
            self.built = build(config, self.thread, device=device)
        except BaseException:
            self.thread.stop()
            raise
        self.plane = QueuedDataPlane(self.built.handle, self.thread)
        self.round = 0
        self.next_block = 1
        self.rows = {}

    def start(self, row, rid, prompt, sampling=GREEDY, blocks=None, **admission):
        """Admit a request and return what its first plan must carry."""
        self.plane.admit(
            [Admission(rid=rid, prompt_tokens=len(prompt), sampling=sampling, **admission)]
        )
        if blocks is None:
            blocks = range(self.next_block, self.next_block + 8)
            self.next_block += 8
        self.rows[row] = [prompt, 0]
        blocks = ints(*blocks)
        patch = TablePatch(
            0, np.full(len(blocks), row, np.int32), np.arange(len(blocks), dtype=np.int32), blocks
        )
        return {"bound": (Bound(row, self.round, rid),), "patches": (patch,)}

    def plan(self, extends=(), decodes=(), **parts):
        """Return a plan: `extends` are (row, tokens to feed), `decodes` are rows."""
        fed, lengths, prefixes, prompts = [], [], [], []
        for row, count in extends:
            prompt, done = self.rows[row]
            fed.extend(prompt[done : done + count])
            lengths.append(min(count, len(prompt) - done))
            prefixes.append(done)
            prompts.append(len(prompt))
            self.rows[row][1] = done + lengths[-1]
        for row in decodes:
            lengths.append(1)
            prefixes.append(self.rows[row][1])
            self.rows[row][1] += 1
        self.round += 1
        batch = None
        if lengths:
            rows = ints(*[row for row, _ in extends], *decodes)
            batch = Batch(
                rows=rows,
                generations=np.zeros_like(rows),
                input_lengths=ints(*lengths),
                prefix_lengths=ints(*prefixes),
                extends=len(extends),
                extend_ids=ints(*fed),
                prompt_lengths=ints(*prompts),
            )
        return Plan(round=self.round, batch=batch, **parts)

    def execute(self, plan, logprobs=None):
        """Queue a plan as it would arrive from elsewhere: encoded, decoded, read-only."""
        return self.plane.execute(decode_plan(encode_plan(plan)), Dispatch(logprobs))

    def run(self, plan, logprobs=None):
        """Execute a plan and return its result."""
        return self.plane.complete(self.execute(plan, logprobs))

    def generate(self, row, rid, prompt, count, chunk=1 << 30, **start):
        """Return `count` tokens of one request that runs alone, one forward ahead."""
        parts = self.start(row, rid, prompt, **start)
        tickets = []
        while self.rows[row][1] < len(prompt):
            tickets.append(self.execute(self.plan([(row, chunk)], **parts)))
            parts = {}
        tickets.extend(self.execute(self.plan(decodes=[row])) for _ in range(count - 1))
        return np.concatenate([self.plane.complete(ticket).tokens for ticket in tickets]).tolist()


@pytest.fixture(scope="session")
def guard(tmp_path_factory):
    if not torch.cuda.is_available():
        load_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture
def emulation(monkeypatch, guard):
    """Return a function that has a forward thread reach an emulated GPU; or nothing beside one."""
    if torch.cuda.is_available():
        return lambda _thread: None
    return partial(emulated, monkeypatch)


@pytest.fixture
def rig(checkpoint):
    """Return a function: family to a running device; stopped at teardown."""
    made = []

    def of(family, **changes):
        made.append(Rig(small_config(checkpoint(family)[1], **changes)))
        return made[-1]

    yield of
    for each in made:
        each.plane.shutdown()
        assert not each.thread.alive
