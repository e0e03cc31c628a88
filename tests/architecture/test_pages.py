"""What pages say of the house holds: its rooms, its flags, its files."""

import re
import shlex
from pathlib import Path

import pytest

from drumline.cli.flags import CONFIG_FLAG, read_arguments
from drumline.cli.verbs import Bench, Chat, Generate, Profile, Serve
from drumline.core.settings import settings_of

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
VERBS = {"serve": Serve, "generate": Generate, "chat": Chat, "bench": Bench, "profile": Profile}
FLAGS = {
    name
    for verb in VERBS.values()
    for flag in settings_of(verb)
    for name in (*flag.names, *flag.off)
} | {CONFIG_FLAG, "--help"}


def by_name(path):
    return path.relative_to(ROOT).as_posix()


def test_the_map_has_a_row_for_every_room():
    rows = [
        row.split("|")[1] for row in (ROOT / "docs/map.md").read_text().splitlines() if "|" in row
    ]
    named = {room for row in rows for room in re.findall(r"`(\w+)`", row)}
    rooms = {path.parent.name for path in (ROOT / "src/drumline").glob("*/__init__.py")}
    assert named == rooms


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_a_flag_that_a_page_names_exists(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text()))
    assert named - FLAGS - {"--x", "--no-x"} == set()


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_a_command_that_a_page_shows_can_be_given(page):
    """Indented `make …` and `drumline …`, and either in quotes; fenced examples are run."""
    text = page.read_text()
    shown = re.findall(r"^    ((?:[A-Z_]+=\S+ )*(?:make|drumline) .*)$", text, re.MULTILINE)
    shown += re.findall(r"`((?:make|drumline) [^`…]*)`", text)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in shown:
        words = shlex.split(line, comments=True)
        while "=" in words[0]:
            words.pop(0)
        command, verb, *rest = words
        if command == "make":
            assert verb in targets, line
            given = [word.removeprefix("ARGS=") for word in rest if word.startswith("ARGS=--")]
            rest, verb = [word for flags in given for word in shlex.split(flags)], "serve"
        if verb in VERBS and "--help" not in rest:
            read_arguments(settings_of(VERBS[verb]), rest)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_a_page_that_a_page_links_to_exists(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists()


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_a_module_that_a_page_names_exists(page):
    """`room.module` and `room/module.py`, for the rooms there are."""
    rooms = "|".join(path.name for path in (ROOT / "src/drumline").iterdir() if path.is_dir())
    for room, module in re.findall(rf"`(?:drumline\.)?({rooms})[./](\w+)", page.read_text()):
        place = ROOT / "src/drumline" / room / module
        assert place.is_dir() or place.with_suffix(".py").is_file(), f"{room}.{module}"
