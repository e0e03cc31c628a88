"""Every example of the README is run as it stands, but for the port."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.processes import REPOSITORY, Server, environment

README = (REPOSITORY / "README.md").read_text()
EXAMPLES = re.findall(r"^```(sh|python)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_readme_has_an_example_of_each_way_to_ask():
    together = "".join(code for _, code in EXAMPLES)
    for way in ("curl", "from openai", "from drumline import LLM", "drumline generate"):
        assert way in together


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_an_example_of_the_readme_answers(language: str, code: str, server: Server):
    code = code.replace("http://127.0.0.1:8000", server.url)
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euc", code]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment() | {"PATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10
    assert "error" not in done.stdout
