"""Drawing by kernels: the same tokens as `draw`, from rows that are never sorted or copied."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from drumline.contract.arrays import IntArray
from drumline.device.kernels.native import Machine, Rows, Ways
from drumline.device.sampling.draw import Places, RowSettings


class NativeDraw:
    """Draws for pool rows as their settings say."""

    __slots__ = ("_machine", "_settings", "_ways")

    def __init__(self, machine: Machine, settings: RowSettings) -> None:
        self._machine = machine
        # The kernels read them where they lie.
        self._settings = settings
        self._ways = Ways(
            settings.greedy.ctypes.data,
            settings.temperature.ctypes.data,
            settings.top_k.ctypes.data,
            settings.top_p.ctypes.data,
            settings.min_p.ctypes.data,
            settings.typical_p.ctypes.data,
            settings.seeds.ctypes.data,
        )

    def __call__(
        self,
        logits: Tensor,
        rows: IntArray,
        positions: IntArray,
        names: Tensor | None = None,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor]:
        count = len(rows)
        rows = np.ascontiguousarray(rows, np.int32)
        positions = np.ascontiguousarray(positions, np.int32)
        tokens = torch.empty(count, dtype=torch.int64)
        best = torch.empty(count)
        at = torch.arange(count) if places is None else torch.from_numpy(places)
        told = Rows(
            logits.data_ptr(),
            count,
            logits.shape[1],
            at.data_ptr(),
            rows.ctypes.data,
            positions.ctypes.data,
            None if names is None else names.data_ptr(),
        )
        self._machine.run(
            "draw",
            ctypes.byref(told),
            ctypes.byref(self._ways),
            tokens.data_ptr(),
            best.data_ptr(),
        )
        return tokens, best
