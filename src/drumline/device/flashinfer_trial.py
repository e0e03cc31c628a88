"""FlashInfer, found and tried on a small batch of a rank's own shape before it is trusted.

The trial also has it compile, or load, the kernels that serving needs.
"""

import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from drumline.device.attention import Attention, AttentionBatch, TorchAttention
from drumline.device.flashinfer_attention import FlashInferAttention, HeadShape, why_unfit
from drumline.device.kv import BlockTable, KvPool
from drumline.device.kv_form import KvForm

_log = logging.getLogger(__name__)

_CLOSE = 2e-2
"""Of values around one, in bfloat16, whose sums are made in another order."""
_ROWS, _COLUMNS = 3, 12
# Prompts long enough for kernels of large tiles, then chunks and answers, then answers alone.
_BATCHES = (
    ((1, 2, 3), (0, 0, 0), (150, 3, 33)),
    ((2, 3, 1), (3, 33, 150), (20, 1, 1)),
    ((1, 2, 3), (151, 23, 34), (1, 1, 1)),
)


class FoundLibrary(Struct, frozen=True):
    """The module and its name with a version, or why there is none to be used."""

    library: Any = None
    name: str = ""
    why_none: str = ""


def find_flashinfer(
    shape: HeadShape, page: int, kept: torch.dtype, device: torch.device
) -> FoundLibrary:
    """Return the library if it is installed and computes attention of such heads here."""
    if importlib.util.find_spec("flashinfer") is None:
        return FoundLibrary(why_none="is not installed: pip install drumline[cuda]")
    why = why_unfit(shape, kept)
    if why is not None:
        return FoundLibrary(why_none=why)
    _log.info("trying FlashInfer, which compiles its kernels at a first start, for minutes")
    try:
        # Seconds, and CUDA's own libraries, for nothing elsewhere.
        import flashinfer  # noqa: PLC0415

        name = f"FlashInfer {flashinfer.__version__}"
        wrong = tried(flashinfer, shape, page, device)
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        return FoundLibrary(why_none=f"failed its trial: {said}")
    if wrong is not None:
        return FoundLibrary(why_none=wrong)
    return FoundLibrary(flashinfer, name)


def tried(library: Any, shape: HeadShape, page: int, device: torch.device) -> str | None:
    """Return what the library gets wrong, if anything."""
    table = BlockTable(_ROWS + 1, _COLUMNS)
    columns = np.arange(_COLUMNS, dtype=np.int32)
    for row in range(1, _ROWS + 1):
        table.patch(np.full_like(columns, row), columns, (_ROWS * columns + row).astype(np.int32))
    theirs = FlashInferAttention(library, _pool(shape, page, device), shape)
    theirs.reserve(_ROWS, _COLUMNS)
    reference = TorchAttention(_pool(shape, page, device))
    for window in sorted(shape.windows, key=str):
        for number, batch in enumerate(_batches(table, theirs.pool, device)):
            heads = _Heads.random(shape, int(batch.lengths.sum()), number, device)
            expected = heads.attended(reference, batch, window)
            made = [heads.attended(theirs, batch, window)]
            if (batch.lengths == 1).all():
                # As what is recorded of decodes reads them.
                theirs.prepare(batch)
                made.append(heads.attended(theirs, batch, window))
            if not all(torch.allclose(each, expected, rtol=0, atol=_CLOSE) for each in made):
                return f"reads other values than PyTorch, in a window of {window or 'all'} tokens"
    return None


def _batches(table: BlockTable, pool: KvPool, device: torch.device) -> Iterator[AttentionBatch]:
    for each in _BATCHES:
        rows, prefixes, lengths = (np.array(numbers, np.int32) for numbers in each)
        yield AttentionBatch(table, rows, lengths, prefixes, pool.shape, device)


def _pool(shape: HeadShape, page: int, device: torch.device) -> KvPool:
    return KvPool(
        # More than the one that is read, so that blocks lie apart.
        layers=2,
        blocks=_ROWS * _COLUMNS + 1,
        block_tokens=page,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        form=KvForm(shape.dtype),
        device=device,
    )


class _Heads(Struct, frozen=True, eq=False):
    """What a batch's tokens ask and say."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def random(cls, shape: HeadShape, tokens: int, seed: int, device: torch.device) -> "_Heads":
        random = torch.Generator().manual_seed(seed)
        query, key, value = (
            torch.randn(tokens, heads, shape.head_dim, generator=random).to(device, shape.dtype)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        return cls(query, key, value)

    def attended(self, by: Attention, batch: AttentionBatch, window: int | None) -> Tensor:
        """Return what a back end's first layer reads, float32."""
        return by(0, self.query, self.key, self.value, batch, window).float()
