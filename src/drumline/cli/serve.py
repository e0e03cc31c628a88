"""`drumline serve`."""

from drumline.cli.verbs import Serve
from drumline.launcher import serve as launcher
from drumline.launcher.headless import serve_headless


def serve(choices: Serve) -> int:
    """Serve until a signal ends it; return the exit status."""
    if choices.config.frontend.headless:
        return serve_headless(choices.config, _say)
    return launcher.serve(choices.config, _say)


def _say(line: str) -> None:
    print(line, flush=True)
