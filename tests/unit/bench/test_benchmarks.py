"""Every benchmark loads and says what it takes; those that are quick run, as small as can be."""

import importlib
import json
import sys

import pytest
from benchmarks.run import NAMES

SMALLEST = {
    "digest": [],
    "round": ["--batch", "1", "--rounds", "20"],
    "wire": ["--rows", "1", "--batches", "5"],
}


def ran(monkeypatch, name, *flags):
    """Run a benchmark's `main`; return the exit status."""
    benchmark = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, *flags])
    try:
        return benchmark.main() or 0
    except SystemExit as end:
        return end.code or 0


@pytest.mark.parametrize("name", [*NAMES, "run", "peers.__main__"])
def test_a_benchmark_says_what_it_takes(name, monkeypatch, capsys):
    assert ran(monkeypatch, name, "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: ")
    assert name == "run" or "--json" in said


@pytest.mark.parametrize("name", list(SMALLEST))
def test_a_quick_benchmark_writes_its_figures_with_the_machine(name, monkeypatch, tmp_path):
    file = tmp_path / "results" / "figures.json"
    ran(monkeypatch, name, *SMALLEST[name], "--json", str(file))
    report = json.loads(file.read_text())
    assert report["benchmark"] == name
    assert report["machine"]["cores"] >= 1
