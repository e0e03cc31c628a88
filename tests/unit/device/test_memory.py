"""Large memory is of the kind that copies are quickest in, on whichever device."""

import re
import sys
from pathlib import Path

import pytest
import torch

from drumline.device.memory import host_memory

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what it was asked for")
def test_host_memory_beside_a_cpu_asks_for_huge_pages_and_is_blank():
    memory = host_memory(5 * MIB)
    assert memory.numel() == 5 * MIB
    assert not memory.any()
    flags = mapping_of(memory.data_ptr())
    assert "hg" in flags, flags


def mapping_of(address):
    """Return the flags of this process's mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")


def test_host_memory_beside_cuda_is_pinned_or_there_is_none():
    if torch.cuda.is_available():
        assert host_memory(MIB, torch.device("cuda")).is_pinned()
    else:
        with pytest.raises((RuntimeError, AssertionError), match=r"accelerator|CUDA"):
            host_memory(MIB, torch.device("cuda"))
