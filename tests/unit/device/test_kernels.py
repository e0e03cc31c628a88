"""Native kernels are compiled once, tried before they are trusted, and done without if need be."""

import logging
import os
import shutil
import sys
import time

import pytest

from drumline.core.config import Config, Dtype, ModelConfig, Quantization
from drumline.core.errors import ConfigError
from drumline.device import backends
from drumline.device.build import build
from drumline.device.forward_thread import ForwardThread
from drumline.device.kernels import compiling
from drumline.device.kernels.compiling import VARIANTS, NotCompiledError, Variant, compiled
from drumline.device.kernels.native import Found, find_kernels
from drumline.device.kernels.processor import instruction_sets
from drumline.device.kernels.trial import tried
from drumline.device.models.config import DecoderConfig

ALL = frozenset[str]().union(*(variant.needs for variant in VARIANTS))
MODEL = DecoderConfig(
    architecture="llama",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    max_positions=256,
    rope_theta=10000.0,
    windows=(None,),
    stored_dtype="quantized",
)


def test_the_best_variant_of_this_processor_passes_its_trial(kernels):
    assert kernels.name in {v.name for v in VARIANTS if v.needs <= instruction_sets()}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_compiles(variant):
    assert compiled(variant, compiling.default_folder()).stat().st_size > 10_000


def test_what_is_compiled_is_not_compiled_again(kernels, monkeypatch):
    variant = next(variant for variant in VARIANTS if variant.name == kernels.name)
    monkeypatch.setattr(compiling, "run_leashed", None)
    assert compiled(variant, compiling.default_folder()).is_file()


@pytest.mark.parametrize("change", ["flags", "sources"])
def test_other_flags_or_sources_are_another_library(tmp_path, monkeypatch, change):
    for source in compiling.SOURCES.glob("*.[hc]*"):
        shutil.copy(source, tmp_path)
    monkeypatch.setattr(compiling, "SOURCES", tmp_path)
    before = compiling._digest(VARIANTS[-1], "/usr/bin/c++")
    variant = VARIANTS[-1]
    if change == "flags":
        variant = Variant("avx2", variant.needs, (*variant.flags, "-g"))
    else:
        (tmp_path / "lanes.h").write_text("// other")
    assert compiling._digest(variant, "/usr/bin/c++") != before


def test_without_a_compiler_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found = find_kernels(tried, tmp_path, has=ALL)
    assert found.kernels is None
    assert "no C++ compiler" in found.why_none
    assert "install g++ 11 or newer" in found.why_none


def test_a_compiler_that_fails_is_quoted(tmp_path):
    broken = Variant("broken", frozenset(), ("-mno-such-thing",))
    with pytest.raises(NotCompiledError, match="no-such-thing"):
        compiled(broken, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_compile_left_is_removed_once_nobody_can_still_work_in_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(compiling, "_compile", lambda _, __, target: target.write_text("none"))
    for name, age_s in (("compiling-old", 3600), ("compiling-now", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.so").touch()
        then = time.time() - age_s
        os.utime(tmp_path / name, (then, then))
    library = compiled(VARIANTS[-1], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"compiling-now", library.name}


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotCompiledError, match=f"{file}/deeper cannot be written"):
        compiled(VARIANTS[-1], file / "deeper")


@pytest.mark.parametrize(
    ("prefix", "folder"),
    [("{tmp}", "{tmp}/share/drumline"), ("/usr", "{tmp}/home/.cache/drumline")],
)
def test_libraries_are_kept_in_the_environment_or_else_at_home(
    tmp_path, monkeypatch, prefix, folder
):
    monkeypatch.setattr(sys, "prefix", prefix.format(tmp=tmp_path))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(compiling.Path, "home", lambda: tmp_path / "home")
    assert str(compiling.default_folder()) == folder.format(tmp=tmp_path)


def test_without_a_home_either_it_is_said_why_there_are_no_kernels(monkeypatch):
    def home():
        raise RuntimeError

    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    monkeypatch.setattr(compiling.Path, "home", home)
    assert "no home directory" in find_kernels(tried, has=ALL).why_none


def test_a_library_that_is_none_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_compile", lambda _, __, target: target.write_text("none"))
    found = find_kernels(tried, tmp_path, VARIANTS[-1:], ALL)
    assert found.kernels is None
    assert "cannot be loaded" in found.why_none


def test_kernels_that_fail_their_trial_give_way_to_the_next_variant(caplog):
    if not VARIANTS[-1].needs <= instruction_sets():
        pytest.skip("the processor has no kernels")
    trials = iter(["a product came out wrong", None])
    found = find_kernels(lambda _: next(trials), None, VARIANTS[-1:] * 2)
    assert found.kernels.name == "avx2"
    assert "no avx2 kernels: a product came out wrong" in caplog.text


def test_a_processor_without_the_instructions_gets_none():
    found = find_kernels(tried, has=frozenset({"sse2"}))
    assert found.kernels is None
    assert "AVX2" in found.why_none


@pytest.mark.parametrize("wrong", ["packed_bytes", "attention", "linear"])
def test_a_trial_notices_what_is_wrong(kernels, wrong):
    class Mistaken:
        """The same kernels, but for one that does nothing or half of it."""

        def call(self, function, *arguments):
            if function == wrong == "packed_bytes":
                return kernels.call(function, *arguments) * 2
            if function == wrong:
                return 0
            if function == "pack" and wrong == "packed_bytes":
                return None
            return kernels.call(function, *arguments)

        run = type(kernels).run

    assert "wrong" in tried(Mistaken())


def asked(**model):
    return ModelConfig(**model)


def without_kernels(*_):
    return Found(None, "there is no compiler")


@pytest.mark.parametrize(
    ("model", "stored", "dtype", "packs"),
    [
        ({}, "quantized", "float32", True),
        ({"dtype": Dtype.FLOAT32}, "quantized", "float32", False),
        ({"quantization": Quantization.NONE}, "quantized", None, False),
        ({"quantization": Quantization.GGUF}, "quantized", "float32", True),
        (
            {"quantization": Quantization.GGUF, "dtype": Dtype.FLOAT32},
            "quantized",
            "float32",
            True,
        ),
        ({}, "float32", "float32", False),
    ],
)
def test_weights_stay_small_integers_unless_floats_were_asked_for(model, stored, dtype, packs):
    how = backends.chosen(asked(**model), stored_as(stored), 1)
    assert how.backend.packs == packs
    assert how.backend.one_call
    assert ("weights in small integers" in how.backend.name) == packs
    if dtype is not None:
        assert str(how.dtype) == f"torch.{dtype}"


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_floats_are_computed_by_kernels_as_well(monkeypatch, dtype):
    monkeypatch.setattr(backends, "instruction_sets", frozenset)
    how = backends.chosen(asked(dtype=dtype), MODEL, 1)
    assert how.backend.one_call
    assert how.backend.name.endswith("kernels")


@pytest.mark.parametrize(
    ("model", "sets", "changes", "ranks"),
    [
        ({"dtype": Dtype.BFLOAT16}, {"amx_bf16"}, {}, 1),
        ({"dtype": Dtype.FLOAT16}, set(), {}, 1),
        ({"dtype": Dtype.FLOAT32}, set(), {}, 2),
        ({"dtype": Dtype.FLOAT32}, set(), {"head_dim": 20}, 1),
        ({"dtype": Dtype.FLOAT32}, set(), {"intermediate_size": 100}, 1),
    ],
    ids=["matrix units", "float16", "two ranks", "heads", "inner values"],
)
def test_where_torch_is_better_or_kernels_do_not_fit_it_is_torch(
    monkeypatch, model, sets, changes, ranks
):
    monkeypatch.setattr(backends, "instruction_sets", lambda: frozenset(sets))
    how = backends.chosen(asked(**model), changed(**changes), ranks)
    assert how.backend.name.startswith("torch")
    assert not how.backend.one_call


def changed(**changes):
    fields = {name: getattr(MODEL, name) for name in MODEL.__struct_fields__}
    return DecoderConfig(**fields | changes)


def stored_as(stored):
    return changed(stored_dtype=stored)


def test_without_kernels_it_is_said_that_weights_become_floats(monkeypatch, caplog):
    monkeypatch.setattr(backends, "find_kernels", without_kernels)
    with caplog.at_level(logging.WARNING):
        how = backends.chosen(asked(), MODEL, 1)
    assert how.backend.name == "torch"
    assert "become floats, which is slower: there is no compiler" in caplog.text


@pytest.mark.parametrize(
    ("model", "stored", "said"),
    [
        ({}, "float32", "--quantization: .* the checkpoint stores float32"),
        ({"dtype": Dtype.BFLOAT16}, "quantized", "--dtype: .* not bfloat16"),
    ],
)
def test_small_integers_that_cannot_be_are_refused(model, stored, said):
    with pytest.raises(ConfigError, match=said):
        backends.chosen(asked(quantization=Quantization.GGUF, **model), stored_as(stored), 1)


def test_small_integers_without_kernels_are_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(backends, "find_kernels", without_kernels)
    with pytest.raises(ConfigError, match="there is no compiler"):
        backends.chosen(asked(quantization=Quantization.GGUF), MODEL, 1)


def test_the_embedded_model_starts_on_its_own_weights_and_says_so():
    thread = ForwardThread()
    try:
        specs = build(Config(), thread).specs
    finally:
        thread.stop()
    assert specs.backend.endswith("kernels, weights in small integers")
    assert specs.model.dtype == "float32"
