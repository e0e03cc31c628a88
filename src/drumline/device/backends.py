"""Which kernels a model is computed with, and in which float type.

It settles what an operator left open against the checkpoint, the processor and what could be
compiled, and says what it settled on. It loads nothing.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
from msgspec import Struct

from drumline.core.config import Dtype, KvCacheDtype, ModelConfig, Quantization
from drumline.core.errors import ConfigError
from drumline.device.attention import Attention, TorchAttention
from drumline.device.blocks import Apportioned, in_blocks, whole
from drumline.device.fixed_attention import FixedAttention
from drumline.device.flashinfer_attention import FlashInferAttention, HeadShape
from drumline.device.flashinfer_trial import find_flashinfer
from drumline.device.kernels.native import Found, Machine, find_kernels
from drumline.device.kernels.processor import instruction_sets
from drumline.device.kernels.trial import tried
from drumline.device.kv import KvPool
from drumline.device.kv_form import KvForm
from drumline.device.layers import Backend, TorchLinear
from drumline.device.models.config import QUANTIZED, DecoderConfig
from drumline.device.models.shard import Shard, shard_of
from drumline.device.native_attention import LANES, POOLS, NativeAttention, fits
from drumline.device.page import BLOCK_TOKENS

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")

_DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}
_KV_DTYPES = {
    KvCacheDtype.FLOAT32: torch.float32,
    KvCacheDtype.BFLOAT16: torch.bfloat16,
    KvCacheDtype.INT8: torch.int8,
}
_MOST_EXACT_SUMMANDS = 2
"""Of so many ranks, a sum has the same bits whichever comes first."""


class Chosen(Struct, frozen=True, eq=False):
    """How a model is computed. `dtype` is that of activations, and of weights that are floats."""

    dtype: torch.dtype
    kv_form: KvForm
    backend: Backend
    apportioned: Apportioned
    machine: Machine | None = None
    """What runs kernels, where there are any."""


def chosen(
    asked: ModelConfig,
    model: DecoderConfig,
    ranks: int,
    kv: KvCacheDtype = KvCacheDtype.AUTO,
    device: torch.device = _CPU,
    shard: Shard | None = None,
) -> Chosen:
    """Return how a model is computed by `ranks` tensor-parallel ranks, of which one has `shard`.

    Raises ConfigError where that is not what was asked for.
    """
    if device.type == "cuda":
        return _chosen_on_cuda(asked, model, kv, device, shard or shard_of(model))
    if asked.deterministic and ranks > _MOST_EXACT_SUMMANDS:
        raise ConfigError(
            "--deterministic",
            f"{ranks} tensor-parallel ranks sum in an order that depends on the batch; "
            f"at most {_MOST_EXACT_SUMMANDS} do not",
        )
    found = find_kernels(tried)
    packs = _packs(asked, model, found)
    dtype = torch.float32 if packs else resolve_dtype(asked.dtype, model.stored_dtype)
    kv_dtype = resolve_kv_dtype(kv, dtype, packs=packs)
    name = "torch"
    attention: Callable[[KvPool], Attention] = TorchAttention
    if asked.deterministic:
        attention = FixedAttention
    machine = None
    attends = (
        found.kernels is not None
        and kv_dtype in POOLS
        and fits(model.heads, model.kv_heads, model.head_dim)
    )
    one_call = (
        attends and ranks == 1 and _in_lanes(model) and (packs or not _torch_is_better(dtype))
    )
    if found.kernels is not None:
        machine = Machine(found.kernels, torch.get_num_threads())
        if attends:
            attention = partial(NativeAttention, machine=machine)
            name = f"torch, attention by {found.kernels.name} kernels"
        if packs or one_call:
            name = f"{found.kernels.name} kernels" + (
                ", weights in small integers" if packs else ""
            )
    if asked.deterministic:
        name += ", deterministic"
    backend = Backend(
        name,
        TorchLinear,
        attention,
        machine,
        packs=packs,
        one_call=machine is not None and one_call,
    )
    return Chosen(
        dtype,
        KvForm(kv_dtype, lines=attends),
        backend,
        in_blocks if asked.deterministic else whole,
        machine,
    )


def _chosen_on_cuda(
    asked: ModelConfig, model: DecoderConfig, kv: KvCacheDtype, device: torch.device, shard: Shard
) -> Chosen:
    """Return how a model is computed on CUDA: in floats, by torch, and FlashInfer if it can be."""
    if asked.deterministic:
        raise ConfigError("--deterministic", "is not to be had on CUDA in this version")
    stored = model.stored_dtype
    if asked.quantization is Quantization.GGUF:
        raise ConfigError("--quantization", "no weights stay small integers on CUDA")
    dtype = _DTYPES.get(asked.dtype)
    if dtype is None:
        dtype = torch.float32 if stored == "float32" else torch.bfloat16
    if stored == QUANTIZED:
        _log.info("quantized weights become %s: nothing computes them as stored on CUDA", dtype)
    kept = resolve_kv_dtype(kv, dtype, packs=False)
    heads = HeadShape(
        len(shard.heads),
        len(shard.kv_heads),
        model.head_dim,
        frozenset(model.windows[shard.layers.start : shard.layers.stop]),
        dtype,
    )
    found = find_flashinfer(heads, BLOCK_TOKENS, kept, device)
    name = "torch"
    attention: Callable[[KvPool], Attention] = TorchAttention
    if found.library is None:
        _log.warning(
            "PyTorch attends, which is slower, and no decodes are recorded: FlashInfer %s",
            found.why_none,
        )
    else:
        name += f", attention by {found.name}"
        attention = partial(FlashInferAttention, found.library, shape=heads)
    return Chosen(dtype, KvForm(kept), Backend(name, TorchLinear, attention), whole)


def _in_lanes(model: DecoderConfig) -> bool:
    """Whether kernels compute linear layers of the model's sizes, whatever their weights are."""
    return not model.hidden_size % LANES and not model.intermediate_size % LANES


def _torch_is_better(dtype: torch.dtype) -> bool:
    """Whether torch multiplies by such weights quicker than the kernels do.

    They have nothing for matrix units, whose rate in bfloat16 is a multiple of what any other
    instruction's is, and which oneDNN uses. Elsewhere they were measured to be the quicker ones.
    """
    return dtype == torch.bfloat16 and "amx_bf16" in instruction_sets()


def _packs(asked: ModelConfig, model: DecoderConfig, found: Found) -> bool:
    """Whether weights that are stored as small integers are computed as such."""
    stored = model.stored_dtype == QUANTIZED
    why = None
    if not stored:
        why = f"the checkpoint stores {model.stored_dtype}"
    elif found.kernels is None:
        why = found.why_none
    match asked.quantization:
        case Quantization.NONE:
            return False
        case Quantization.GGUF:
            if why is not None:
                raise ConfigError("--quantization", f"weights cannot stay small integers: {why}")
            if asked.dtype not in {Dtype.AUTO, Dtype.FLOAT32}:
                raise ConfigError(
                    "--dtype",
                    f"weights that stay small integers are computed in float32, not {asked.dtype}; "
                    "leave it out, or say --quantization none",
                )
            return True
        case Quantization.AUTO:
            if stored and why is not None:
                _log.warning("quantized weights become floats, which is slower: %s", why)
            return why is None and asked.dtype is Dtype.AUTO


def resolve_dtype(asked: Dtype, stored: str) -> torch.dtype:
    """Return the float type to compute in; `auto` takes the checkpoint's where that is native."""
    if asked is not Dtype.AUTO:
        return _DTYPES[asked]
    if stored == "float32":
        return torch.float32
    # Quantized checkpoints were made from half-precision ones. float16 overflows where
    # bfloat16 does not, and no processor here is quicker at it.
    if has_native_bfloat16():
        return torch.bfloat16
    _log.info(
        "computing in float32: the checkpoint is %s, and this processor has no native bfloat16",
        stored,
    )
    return torch.float32


def resolve_kv_dtype(asked: KvCacheDtype, dtype: torch.dtype, *, packs: bool) -> torch.dtype:
    """Return what keys and values are kept as beside activations of `dtype`.

    Beside small integers, half of float32 changes no answer that those have not changed more.
    """
    if asked is not KvCacheDtype.AUTO:
        return _KV_DTYPES[asked]
    return torch.bfloat16 if packs else dtype


def has_native_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 matrices by instructions of its own."""
    return bool({"avx512_bf16", "amx_bf16"} & instruction_sets())
