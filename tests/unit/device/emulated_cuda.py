"""A CUDA device that is not there: its tensors hold their values on the host, and are told apart.

What mixes devices, waits for the device, or lets it wait for the host's pageable memory raises, as
on a GPU it would or should, and everything else computes. What is copied to the host without a
wait arrives when its event is waited for, and is rubbish before. On a stream of its own, what is
copied is read and written no sooner than its event is waited for, by the host or by the device.

A torch for CPUs alone does not know what it is to switch to a GPU, so a few lines of C++ are
compiled that say: nothing.
"""

import ctypes
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from drumline.device.memory import host_memory

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)

WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten.index_put.default,
}
HERE_AND_THERE = {aten.copy_.default, aten._to_copy.default}


class WaitedError(Exception):
    """Something waited for the device, or had it wait, that must not."""


class MixedError(Exception):
    """An operation was given tensors of several devices."""


class Far(torch.Tensor):
    """A tensor of the emulated device."""

    @staticmethod
    def __new__(cls, near):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=DEVICE,
        )

    def __init__(self, near):
        self.near = near

    def __repr__(self):
        return f"Far({self.near})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran where no device is reached")


def far(value):
    return Far(value) if isinstance(value, torch.Tensor) and not isinstance(value, Far) else value


def near(value):
    return value.near if isinstance(value, Far) else value


class Copy:
    """A copy that is to happen."""

    def __init__(self, target, source):
        self.target, self.source = target, source

    def run(self):
        self.target.copy_(self.source)


class EmulatedCuda(TorchDispatchMode):
    """Computes what is asked of the emulated device, on the thread that it is entered on."""

    def __init__(self):
        super().__init__()
        self.strict = False
        """Whether nothing may wait."""
        self.underway = []
        """What is copied, target and source, and nobody waited for yet."""
        self.lock = threading.Lock()
        self.aside = False
        """Whether what is done now is on a stream of its own."""
        self.raised = 0
        """Copies to the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        there = [each for each in tensors if isinstance(each, Far)]
        asked = kwargs.get("device")
        made_there = asked is not None and torch.device(asked).type == "cuda"
        if not there and not made_there:
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        ):
            with self:
                return func.decompose(*args, **kwargs)
        if made_there:
            kwargs["device"] = "cpu"
        if func in HERE_AND_THERE:
            return self._moved(func, args, kwargs, made_there or (asked is None and bool(there)))
        mixed = [each for each in tensors if not isinstance(each, Far) and each.dim()]
        if mixed:
            raise MixedError(f"{func}: {[(tuple(each.shape), each.device) for each in tensors]}")
        waits = func in WAITS or (
            func in INDEXING
            and any(each is not None and each.dtype == torch.bool for each in args[1])
        )
        if waits:
            self._wait(func)
        out = func(*tree_map(near, args), **tree_map(near, kwargs))
        if func in {aten._local_scalar_dense.default, aten.equal.default}:
            return out
        # What is written in place is the tensor that was given.
        for given in there:
            if out is given.near:
                return given
        # A view of a tensor that is none of inference mode's must be none either.
        inference = torch.is_inference_mode_enabled() and all(each.is_inference() for each in there)
        with torch.inference_mode(inference):
            return tree_map(far, out)

    def _moved(self, func, args, kwargs, to_far):
        if func is aten.copy_.default:
            target, source = args[:2]
            waitless = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if isinstance(target, Far) == isinstance(source, Far):
                near(target).copy_(near(source))
            elif isinstance(target, Far):
                self._raise(waitless)
                if self.aside:
                    self.underway.append(Copy(target.near, source))
                else:
                    target.near.copy_(source)
            else:
                self._lower(target, source.near, waitless)
            return target
        (source,) = args
        waitless = kwargs.get("non_blocking", False)
        if isinstance(source, Far) and not to_far:
            self._wait(func)
            return func(source.near, **kwargs)
        if not isinstance(source, Far):
            self._raise(waitless)
        return Far(func(near(source), **kwargs).clone())

    def _raise(self, waitless):
        self.raised += 1
        if not waitless:
            self._wait("a copy from pageable memory")

    def _lower(self, target, source, waitless):
        if not waitless:
            self._wait("a copy to the host")
            target.copy_(source)
            return
        held = source if self.aside else source.clone()
        target.view(torch.uint8).fill_(0xA5)
        self.underway.append(Copy(target, held))

    def _wait(self, what):
        if self.strict:
            raise WaitedError(str(what))


def emulated(monkeypatch, thread):
    """Have a forward thread reach the emulated device; returns its mode."""
    mode = EmulatedCuda()

    class Event:
        def __init__(self, **_):
            self.copies, self.aside = [], False

        def record(self, _stream=None):
            self.copies, self.aside = list(mode.underway), mode.aside

        def query(self):
            return not self.copies

        def synchronize(self):
            if self.aside:
                # So late that what is computed meanwhile had better waited by itself.
                time.sleep(0.5)
            self.arrive()

        def arrive(self):
            with mode.lock, torch.inference_mode():
                for copy in self.copies:
                    if copy in mode.underway:
                        mode.underway.remove(copy)
                        copy.run()

    class Stream:
        def __init__(self, _device=None):
            pass

        def wait_stream(self, _other):
            pass

        def wait_event(self, event):
            event.arrive()

    @contextmanager
    def on(_stream):
        mode.aside = True
        yield
        mode.aside = False

    main = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "emulated")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 << 30, 10 << 30))
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: int(mode.strict))
    monkeypatch.setattr(
        torch.cuda,
        "set_sync_debug_mode",
        lambda asked: setattr(mode, "strict", asked not in {0, "default"}),
    )
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr("drumline.device.host_pool.host_memory", lambda size, _: host_memory(size))
    monkeypatch.setattr(
        "drumline.device.staging.pinned", lambda size: torch.empty(size, dtype=torch.uint8)
    )
    # It is left with the thread.
    thread.call(mode.__enter__)
    return mode


_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>);
}
"""


def load_guard(directory):
    """Let this process switch to a GPU that is not there."""
    if torch.version.cuda is not None:
        pytest.skip("this torch knows GPUs; `make gpu-check` checks it on one")
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, library = directory / "guard.cpp", directory / "guard.so"
    source.write_text(_GUARD)
    root = Path(torch.__path__[0])
    flags = ["-std=c++17", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib"]
    subprocess.run([compiler, *flags, source, "-o", library, "-lc10"], check=True)
    ctypes.CDLL(str(library))
