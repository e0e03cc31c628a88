"""The README's table of flags is the structs' own. Run this file to write it anew."""

import re
from pathlib import Path

from drumline.cli.help import aliases, shown
from drumline.cli.verbs import Serve
from drumline.core.settings import settings_of

README = Path(__file__).parents[3] / "README.md"
MARKED = re.compile(r"(<!-- flags -->\n).*?(<!-- /flags -->)", re.DOTALL)


def flags_table() -> str:
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for flag in settings_of(Serve):
        spelled = ", ".join(f"`{name}`" for name in (flag.name, *aliases(flag)))
        rows.append(f"| {spelled} | {shown(flag.default) or '-'} | {flag.help} |")
    return "\n".join(rows) + "\n"


def written(text: str) -> str:
    return MARKED.sub(lambda found: found[1] + flags_table() + found[2], text)


def test_the_readme_lists_every_flag_with_default_and_meaning():
    text = README.read_text()
    assert MARKED.search(text)
    assert written(text) == text, f"run python {Path(__file__).relative_to(README.parent)}"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
