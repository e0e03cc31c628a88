"""Tensors that arrive in a message, as the bytes of a safetensors file."""

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

_PICKLED = (b"\x80", b"PK\x03\x04")
"""What pickles begin with, bare or in an archive of torch's."""


class TensorsRefusedError(Exception):
    """Why bytes are no tensors that are read here."""


def read_tensors(data: bytes) -> dict[str, Tensor]:
    """Return the named tensors. Raises TensorsRefusedError saying what the bytes are instead."""
    # A safetensors file begins with its header's length, whose bytes may be any, and the header.
    if data.startswith(_PICKLED) and data[8:9] != b"{":
        raise TensorsRefusedError(
            "the tensors are pickled, and a pickle can run any code, so none is read; send the "
            "bytes of a safetensors file"
        )
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise TensorsRefusedError(
            f"the {len(data)} bytes are no safetensors file: {error}"
        ) from None
    return tensors
