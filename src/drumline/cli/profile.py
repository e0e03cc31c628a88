"""`drumline profile merge`: the traces of several ranks as one, and what each of them says."""

from pathlib import Path

from drumline.bench.traces import files_of, merge, table
from drumline.cli.verbs import Profile
from drumline.core.errors import ConfigError


def profile(choices: Profile, words: list[str]) -> int:
    """Merge the files or directories behind `merge`; return the exit status."""
    if words[:1] != ["merge"]:
        told = f"it is {words[0]!r}" if words else "there is none"
        raise ConfigError("profile", f"the word behind it is merge; {told}")
    if not words[1:]:
        raise ConfigError("profile merge", "name the traces, or the directory they are in")
    print(table(merge(files_of(words[1:]), Path(choices.merge.output))))
    print(f"merged into {choices.merge.output}")
    return 0
