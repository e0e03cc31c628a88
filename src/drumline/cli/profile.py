"""`drumline profile merge`: the traces of several ranks as one, and what each of them says."""

from pathlib import Path

from drumline.bench.traces import files_of, merge, table
from drumline.cli.verbs import Profile
from drumline.core.errors import ConfigError


def profile(choices: Profile, words: list[str]) -> int:
    """Merge the files or directories behind `merge`; return the exit status."""
    if words[:1] != ["merge"]:
        told = repr(words[0]) if words else "nothing"
        raise ConfigError("profile", f"{told} is not to be had of profiles; there is merge")
    if not words[1:]:
        raise ConfigError("profile merge", "name the traces, or the directory they are in")
    print(table(merge(files_of(words[1:]), Path(choices.output))))
    print(f"merged into {choices.output}")
    return 0
