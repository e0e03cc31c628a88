"""`drumline serve`."""

from drumline.cli.verbs import Serve
from drumline.launcher import serve as launcher
from drumline.launcher.behind_gateway import serve_behind_gateway
from drumline.launcher.headless import serve_headless


def serve(choices: Serve) -> int:
    """Serve until a signal ends it; return the exit status."""
    if choices.config.frontend.headless:
        return serve_headless(choices.config, _say)
    if choices.config.frontend.gateway is not None:
        return serve_behind_gateway(choices.config, _say)
    return launcher.serve(choices.config, _say)


def _say(line: str) -> None:
    print(line, flush=True)
