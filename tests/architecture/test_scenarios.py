"""Every scenario that the scheduler was specified by has a test."""

import ast
import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "unit" / "scheduler"


def _table() -> dict[int, tuple[str, ...]]:
    spec = importlib.util.spec_from_file_location("scenarios", FOLDER / "scenarios.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SCENARIOS


SCENARIOS = _table()


def _names(path: Path) -> set[str]:
    """What a test file has at its top: functions, classes, and names that are given to some."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("number", range(1, 75))
def test_every_scenario_has_a_test_that_exists(number):
    tests = SCENARIOS[number]
    assert tests
    for test in tests:
        file, name = test.split(".")
        assert name in _names(FOLDER / f"{file}.py"), f"there is no {test}"


def test_no_scenario_is_made_up():
    assert set(SCENARIOS) == set(range(1, 75))
