"""The command's verbs, errors and exit codes, before anything is started."""

import gzip
import os
import signal
import subprocess
import sys

import pytest

from drumline.cli.__main__ import main
from drumline.core.version import VERSION


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for verb in ("PORT", "MODEL"):
        monkeypatch.delenv(f"DRUMLINE_{verb}", raising=False)


def test_no_verb_shows_what_there_is_and_fails(capsys):
    assert main([]) == 2
    assert "drumline VERB" in capsys.readouterr().err


def test_version_is_the_packages(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"drumline {VERSION}\n"


def test_env_names_versions_and_machine(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert f"drumline {VERSION}" in out
    assert "msgspec 0" in out


def test_profiles_are_merged_and_their_ranks_told(tmp_path, capsys):
    trace = b'{"traceEvents": [], "baseTimeNanoseconds": 5}'
    (tmp_path / "p-TP0.trace.json.gz").write_bytes(gzip.compress(trace))
    merged = tmp_path / "merged"
    assert main(["profile", "merge", str(tmp_path), "--output", str(merged)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1].split()[:2] == ["TP0", "0"]
    assert told[-1] == f"merged into {merged}"
    assert merged.exists()


@pytest.mark.parametrize("verb", ["serve", "generate", "chat"])
def test_help_of_a_verb_lists_its_flags(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert "--max-model-len" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["sevre"], "sevre: no such verb; did you mean serve?"),
        (["brew"], "brew: no such verb; there are serve, generate, chat"),
        (["run", "x"], "run: no such verb; use chat"),
        (["bench", "serve"], "bench: there are only flags behind it; it is 'serve'"),
        (["bench", "--base-url", "localhost"], "--base-url: 'localhost' is no URL; write http"),
        (["bench", "--request-rate", "0"], "--request-rate: '0' will not do"),
        (["bench", "--output-file", "/no/where"], "--output-file: '/no/where' is in no directory"),
        (["serve", "a", "b"], "MODEL: one model is served"),
        (["serve", "a", "--model", "b"], "MODEL: 'a' is named beside --model"),
        (["serve", "--prot", "1"], "--prot: unknown flag; did you mean --port?"),
        (["generate", "Hi", "--port", "1"], "--port: unknown flag"),
        (["profile"], "profile: the word behind it is merge; there is none"),
        (["profile", "split", "x"], "profile: the word behind it is merge; it is 'split'"),
        (["profile", "merge"], "profile merge: name the traces"),
        (["profile", "merge", "/nowhere.trace.json.gz"], "/nowhere.trace.json.gz: cannot be read"),
        (["profile", "merge", "x", "--port", "1"], "--port: unknown flag"),
        (
            ["serve", "--kvstore-write-policy", "write_back"],
            "--kvstore-write-policy: has no effect without --enable-kvstore",
        ),
    ],
)
def test_what_the_operator_got_wrong_is_one_line_and_status_2(argv, told, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_no_file_takes_the_number_of_a_closed_standard_stream():
    program = (
        "import os, sys; os.close(0); os.close(1)\n"
        "from drumline.cli.__main__ import main\n"
        "main(['version']); os.write(2, b'%d' % os.open(os.devnull, os.O_RDONLY))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=30, check=True
    )
    assert int(done.stderr) > 2


@pytest.mark.parametrize("words", [["serve", "--help"], ["version"], ["--help"]])
def test_a_reader_that_has_seen_enough_gets_no_traceback(words):
    # A pipe whose reader is gone before the first byte, as `| head -0` would leave it.
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "drumline", *words],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE
