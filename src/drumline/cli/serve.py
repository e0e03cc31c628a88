"""`drumline serve`."""

from drumline.cli.verbs import Serve
from drumline.launcher import serve as launcher


def serve(choices: Serve) -> int:
    """Serve until a signal ends it; return the exit status."""
    return launcher.serve(choices.config, _say)


def _say(line: str) -> None:
    print(line, flush=True)
